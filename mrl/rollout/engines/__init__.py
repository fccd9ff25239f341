"""SGLang servers: their arguments, and the start and end of their processes on this machine or on Ray nodes."""
