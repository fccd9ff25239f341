"""The mathematics of the update: advantages, losses, and how they are averaged. Pure functions of arrays and tensors."""
