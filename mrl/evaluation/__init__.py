"""`mrl generate` samples responses to a data set. `mrl evaluate` computes pass@k, maj@k and the mean score of the responses."""
