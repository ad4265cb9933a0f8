"""Making a drafter for a target: data synthesis, objective, training loop, export and evaluation."""
