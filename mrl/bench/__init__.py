"""Measurements of one GPU for `mrl bench gpu`: kernels, a training step, movement of the trainer's state, transfers."""
