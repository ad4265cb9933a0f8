"""The engine: requests, scheduling, pages, the speculative step, verification and sampling."""
