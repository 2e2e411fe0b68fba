"""Prefix caches: KV blocks that are found and shared again, in the orders of vLLM, SGLang, TGI and TensorRT-LLM."""

from typing import Literal

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
"""When SGLang's HiCache copies a node of its radix tree to the host."""
