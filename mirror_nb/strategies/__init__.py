"""Strategies: what the user holds. One abstract, the rest final."""
