"""The whole loop with real parts: Ray, Megatron, SGLang; each run is a process of its own, as a user starts it."""
