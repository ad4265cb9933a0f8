"""Target models: configurations, weights, tokenizers, architectures, and the catalogue of names."""
