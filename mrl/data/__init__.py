"""Rows of prompts and responses: reading and checking them, streaming them, and cutting batches."""
