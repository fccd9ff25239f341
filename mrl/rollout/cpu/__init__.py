"""SGLang on a CPU: a platform plug-in, with attention and other operators in torch. This file does not import SGLang."""

ATTENTION_BACKEND = "mrl_batched_sdpa"
"""Name of the attention backend that the module `sdpa_attention` registers with SGLang."""
