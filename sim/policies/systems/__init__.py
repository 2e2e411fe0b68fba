"""Schedulers of real systems, by their own parameter names and defaults."""
