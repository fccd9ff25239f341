"""Advantages, losses, KL penalties and corrections of the policy update: pure functions of arrays and tensors."""
