"""The serving benchmark: prompts of a dataset sent to any OpenAI-compatible server."""
