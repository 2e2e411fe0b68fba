"""Triton Inference Server's dynamic batcher."""
