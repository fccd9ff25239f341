"""Diagnostics of training steps: parity between layouts, step dumps and their replay."""
