"""Fused GPU kernels of the rollout, each beside the plain PyTorch twin that it must equal."""
