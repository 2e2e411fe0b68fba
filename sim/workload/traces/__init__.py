"""Recorded requests: readers of public trace formats, any other file by mapping, and changes of their load."""
