"""Makes the fork server of the worker processes adopt orphaned processes of rewards. Only the fork server imports this module.

A process that a reward starts, for example by a double fork, may outlive the worker process. Such a process becomes a child of
the fork server, where mrl.rewards.scorer finds and ends it. The import of this module makes the importing process a
subreaper.
"""

import warnings

from mrl.core.processes import become_subreaper

become_subreaper()
# The fork server did not start the adopted processes, so it would warn when it reaps them.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
