"""Output of a run: metrics (terminal, JSON Lines files, wandb and other trackers), learning curve, timeline and HTML report."""
