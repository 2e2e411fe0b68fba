"""What is simulated: models and GPUs, with their sources, and the KV memory that follows from them."""
