"""Data sets of prompts and supervised rows, tokenizers, and the balancing of batches."""
