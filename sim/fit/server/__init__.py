"""Loads for a user's own running server: what they learn is left as files of measured runs, which a fit is made of."""
