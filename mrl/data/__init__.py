"""Data sets of prompts and of supervised rows, tokenizers, and the balancing of batches over replicas."""
