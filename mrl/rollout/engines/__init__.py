"""SGLang servers: their arguments, their processes on this machine or on Ray nodes, and how these end."""
