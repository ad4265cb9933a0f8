"""The rollout in a handful of Triton kernels, each beside the plain PyTorch twin it must equal."""
