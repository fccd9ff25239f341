"""Names that both a driver without SGLang and the processes inside SGLang need."""

ATTENTION_BACKEND = "mrl_batched_sdpa"
"""Under which `cpu_attention` registers itself with SGLang."""
