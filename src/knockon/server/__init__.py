"""An OpenAI-compatible HTTP server; the engine runs in a process of its own."""
