"""`mrl generate` samples responses to the prompts of a data set. `mrl evaluate` computes their pass@k, maj@k and mean score."""
