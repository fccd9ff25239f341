"""The controller: the training loop, the plan it is built from, and the processes that it drives."""
