"""Measurements of one GPU for `mrl bench gpu`: kernels, a training step, offload of the trainer's state, transfers."""
