"""The state of a run on disk: its folder, its checkpoints, and the decision where to resume."""
