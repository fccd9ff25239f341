"""Conversion of weights between Hugging Face tensors and Megatron shards, from one table per model family."""
