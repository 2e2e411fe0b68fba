"""The scheduler of llama.cpp's server."""
