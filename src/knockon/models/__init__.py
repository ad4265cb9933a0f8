"""Target models: their configuration, weights, tokenizers and forward passes."""
