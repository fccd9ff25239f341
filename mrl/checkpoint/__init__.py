"""The state of a run on disk: run directory, checkpoints, sample ledger, and the choice of the checkpoint to resume from."""
