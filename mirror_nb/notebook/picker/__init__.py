"""The picker: which devices and how, by ticking boxes instead of writing `%mirror start`."""
