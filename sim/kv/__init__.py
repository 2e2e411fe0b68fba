"""Prefix caches: KV blocks that are found and shared again, in the orders of vLLM, SGLang, TGI and TensorRT-LLM."""
