"""Weights between Hugging Face names and Megatron shards: declared once per family, used in both directions."""
