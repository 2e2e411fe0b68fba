"""vLLM: its scheduler, asynchronous or not, in a pipeline or with draft tokens, and its knobs."""
