"""The commands of `mrl`: one module for each command."""
