"""A run's results as a page to look around in, served on this machine alone."""
