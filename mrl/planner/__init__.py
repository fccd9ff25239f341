"""Predicts the memory and the step time of a run, searches layouts, and simulates rollouts. Needs no GPU."""
