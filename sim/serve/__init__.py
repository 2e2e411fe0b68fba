"""An OpenAI-compatible endpoint over simulated engines or one on a model, in real time."""
