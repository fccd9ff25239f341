"""Advantages, losses, KL penalties and corrections: pure functions of arrays and tensors, the parts of a policy update."""
