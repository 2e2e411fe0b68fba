"""The batching policies: `families` and `systems`, named in `registry`."""
