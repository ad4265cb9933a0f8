"""The same rollout inside other engines. Nothing here is imported unless that engine asks for it."""
