"""SGLang servers: arguments, processes on this machine or on Ray nodes, and how they are ended."""
