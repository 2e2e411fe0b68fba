"""An OpenAI-compatible endpoint over the simulated engine, in real time."""
