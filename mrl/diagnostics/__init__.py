"""Diagnostics: parity checks of layouts, comparison of an engine with the trainer, step dumps, and the replay of step dumps."""
