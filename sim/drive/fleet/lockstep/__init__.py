"""Ranks of one model that step together: vLLM's data parallelism of models with experts."""
