"""Checks of a training step: parity between layouts, and recorded steps that can be replayed."""
