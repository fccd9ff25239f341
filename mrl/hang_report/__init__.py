"""Says which process waits where when a run stands still, and which one died."""
