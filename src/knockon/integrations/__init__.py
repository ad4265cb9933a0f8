"""The same rollout inside other engines. Nothing here is imported unless such an engine asks."""
