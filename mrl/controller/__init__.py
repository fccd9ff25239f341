"""The controller: the training loop, the plan that it is built from, and the processes that it drives."""
