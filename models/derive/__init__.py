"""Proposes a model family from a config of transformers: finds what each tensor does, writes the family file, and tests it."""
