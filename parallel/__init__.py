"""Megatron-Core's parallel dimensions behind a small, device-neutral surface (knows nothing of models or of mrl)."""
