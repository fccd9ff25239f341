"""Model families, and conversion of Hugging Face checkpoints to Megatron models and back. This package does not import mrl."""
