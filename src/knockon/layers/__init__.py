"""Tensor-parallel building blocks of a transformer."""
