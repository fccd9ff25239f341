"""Gives simulated GPUs to this process. Python imports this file when it starts, if PYTHONPATH contains this folder."""

import os

import gpu_stand_in

if gpu_stand_in.HOST in os.environ:
    gpu_stand_in.install()
