"""The commands of `mrl`, one module each."""
