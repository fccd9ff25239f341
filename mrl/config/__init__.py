"""The config of a run: the schema of every key, its validation, and the objects that it names."""
