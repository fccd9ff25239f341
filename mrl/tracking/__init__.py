"""Writes the metrics of a run to the terminal, JSON Lines files, wandb and a picture of the learning curve."""
