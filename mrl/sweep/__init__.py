"""Many runs of one command, with other values of some keys: made, checked, run side by side, compared."""
