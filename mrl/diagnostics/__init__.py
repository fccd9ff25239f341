"""Diagnostics of training steps: parity checks of layouts, step dumps, and the replay of step dumps."""
