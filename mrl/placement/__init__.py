"""Places processes on devices: connects to a Ray cluster, makes a placement group for each pool, and shows device maps."""
