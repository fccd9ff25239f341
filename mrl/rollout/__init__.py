"""Rollout: the rollout manager of the driver, the rollout worker that samples and scores, and the SGLang engines."""
