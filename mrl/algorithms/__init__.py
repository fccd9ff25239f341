"""The mathematics of the update: advantages, losses, and how they are averaged; pure functions."""
