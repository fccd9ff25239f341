"""What a run would cost in other shapes: pure arithmetic, on any machine."""
