"""PreemptionHandler: the first signal ends the run after its step, the second one ends it at once."""

import os
import signal
import subprocess
import sys

import pytest

from mrl.core.run_errors import REQUEUE_STATUS, PreemptedError, PreemptionHandler, check_wait


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_process_starts_ends_the_run_at_once(number):
    previous = signal.getsignal(number)
    with PreemptionHandler() as preemption, pytest.raises(PreemptedError, match=signal.Signals(number).name):
        os.kill(os.getpid(), number)
    assert preemption() and signal.getsignal(number) is previous


def test_an_abandonable_step_is_abandoned_where_the_driver_waits():
    with PreemptionHandler(lambda: True) as preemption:
        check_wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption(), "the signal handler itself raises nothing"
        with pytest.raises(PreemptedError, match="SIGUSR1"):
            check_wait()
    check_wait()


def test_any_other_step_is_finished():
    with PreemptionHandler(lambda: False) as preemption:
        assert not preemption()
        os.kill(os.getpid(), signal.SIGUSR1)
        check_wait()
        assert preemption()


TWICE = """
import os, signal, time
from mrl.core.run_errors import PreemptionHandler
with PreemptionHandler(lambda: False):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""


def test_the_second_signal_ends_the_process_at_once():
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 128 + signal.SIGTERM and "still here" not in ended.stdout


def test_a_duplicate_signal_counts_once():
    """The driver gets a signal twice: Slurm signals all processes of a job step, and the supervisor forwards its signal."""
    with PreemptionHandler(lambda: False) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption()


def test_the_exit_status_that_requests_a_requeue_is_ex_tempfail():
    assert REQUEUE_STATUS == os.EX_TEMPFAIL
