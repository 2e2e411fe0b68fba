"""The families of batching policies, and what several policies share."""
