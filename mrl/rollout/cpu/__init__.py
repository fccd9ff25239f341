"""SGLang on a CPU: a platform plug-in with attention and operators in torch. The driver can import this without SGLang."""

ATTENTION_BACKEND = "mrl_batched_sdpa"
"""Name under which `sdpa_attention` registers itself with SGLang."""
