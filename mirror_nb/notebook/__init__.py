"""The notebook front: magics that parse, what they show, and nothing else. Imported by `%load_ext` alone."""
