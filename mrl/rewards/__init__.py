"""Rewards: responses -> numbers."""
