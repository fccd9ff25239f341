"""Rollout: the driver's manager, the worker that samples and scores, and the SGLang engines."""
