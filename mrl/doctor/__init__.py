"""The preflight check: what hosts say about themselves, what they find out together, and the rules that judge it."""
