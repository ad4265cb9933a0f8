"""Target architectures, their weights and configurations, and the catalogue of names."""
