"""Metrics of a run: the terminal, JSON Lines, wandb and the learning curve."""
