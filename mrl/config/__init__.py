"""The config of a run: the schema of all keys, the checks of their values, and the instantiation of plug-ins."""
