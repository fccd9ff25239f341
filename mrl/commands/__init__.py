"""The commands of `mrl`, one thin file each."""
