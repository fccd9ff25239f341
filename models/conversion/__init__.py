"""Conversion of weights between Hugging Face tensors and Megatron shards, with one table for each model family."""
