"""Makes the fork server of the worker processes adopt orphaned processes of rewards. Only the fork server imports this module.

If a reward starts a process that outlives its worker process, for example by a double fork, the process becomes a child of
the fork server. mrl.rewards.worker_pool finds it there and ends it. Importing this module changes the importing process.
"""

import warnings

from mrl.core.processes import become_subreaper

become_subreaper()
# The fork server reaps these processes. It would warn about them, because it did not start them.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
