"""Compiled shapes: the sizes of steps for which a device has programs, and the one that each step runs in."""
