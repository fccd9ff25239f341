"""Python imports this file when it starts, if the folder is on PYTHONPATH. It gives processes simulated GPUs."""

import os

import gpu_stand_in

if gpu_stand_in.HOST in os.environ:
    gpu_stand_in.install()
