"""Steps that are kept whole: their folders, when a run writes one, and how it is run again."""
