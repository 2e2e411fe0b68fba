"""Recordings of the scheduler of an installed engine, made in virtual time on the requests of a scenario."""
