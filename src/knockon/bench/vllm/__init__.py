"""vLLM's engine with and without the plugin, measured and compared (docs/vllm.md)."""
