"""Text Generation Inference's router and batcher."""
