"""Memory of a run, by process and phase: pure arithmetic, on any machine."""
