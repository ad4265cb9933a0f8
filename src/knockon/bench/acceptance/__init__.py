"""Accept lengths of drafters on real prompts, by verify width and workload."""
