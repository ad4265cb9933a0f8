"""Measurements: the demo, generation speed, the workload matrix."""
