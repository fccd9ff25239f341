"""The state of a run on disk: run directory, checkpoints, sample ledger, and the resume point."""
