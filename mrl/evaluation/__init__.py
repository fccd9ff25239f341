"""`mrl generate` and `mrl evaluate`: resumable sampling of a data set, and pass@k, maj@k and mean score of the samples."""
