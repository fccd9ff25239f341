"""Trainer ranks: the Megatron processes that train a model, one on each GPU."""
