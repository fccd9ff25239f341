"""What one host can say about itself, by reading: no torch, no Ray, nothing changed."""
