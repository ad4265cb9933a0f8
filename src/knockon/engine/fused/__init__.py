"""What the engine computes of a step in kernels of its own, beside the plain twins."""
