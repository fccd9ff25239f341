"""The parts of a policy update: advantages, losses, KL penalties and corrections, as pure functions of arrays and tensors."""
