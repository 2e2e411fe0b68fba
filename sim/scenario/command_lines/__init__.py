"""The command lines that start engines' servers, read into the keys of a scenario and written back.

`flags` says what a flag may be and reads a line by an engine's table; `vllm`, `sglang` and `tensorrt_llm` are these
tables, and `engines` has them all.
"""
