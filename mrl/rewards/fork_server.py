"""Keeps all processes that rewards start below the fork server of the worker processes, which imports this module first.

If a reward starts a process that outlives its worker process, for example by a double fork, the process becomes a child of
the fork server. mrl.rewards.worker_pool finds it there and ends it. Importing this module changes the importing process.
"""

import warnings

from mrl.core.processes import become_subreaper

become_subreaper()
# The fork server reaps such processes, and warns because it did not start them.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
