"""The engine: requests in, tokens out, by the speculative step."""
