"""Predicts memory and step time of a run, searches layouts, and simulates rollouts. Needs no GPU."""
