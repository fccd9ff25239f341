"""Sampling a data set to files that can be taken up again, and what the samples say of a model."""
