"""Making a drafter for a target: data synthesis, objective, loop, export, evaluation."""
