"""Model families: how a Hugging Face checkpoint becomes a Megatron model and back (knows nothing of mrl)."""
