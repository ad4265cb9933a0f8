"""Knockon: Domino speculative decoding, tensor-parallel, with the target's own tokens."""

__version__ = "0.1.0"
