"""Signals that ask a run to leave: the first is heeded, the second ends it at once."""

import os
import signal
import subprocess
import sys

import pytest

from mrl.core.run_errors import REQUEUE, PreemptedError, PreemptionHandler, check_wait


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_anything_is_started_a_run_ends_at_once(number):
    former = signal.getsignal(number)
    with PreemptionHandler() as leaving, pytest.raises(PreemptedError, match=signal.Signals(number).name):
        os.kill(os.getpid(), number)
    assert leaving() and signal.getsignal(number) is former


def test_a_step_that_can_be_given_up_is_given_up_where_the_driver_waits():
    with PreemptionHandler(lambda: True) as leaving:
        check_wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert leaving(), "nothing is raised inside whatever runs"
        with pytest.raises(PreemptedError, match="SIGUSR1"):
            check_wait()
    check_wait()


def test_another_step_goes_on_to_its_end():
    with PreemptionHandler(lambda: False) as leaving:
        assert not leaving()
        os.kill(os.getpid(), signal.SIGUSR1)
        check_wait()
        assert leaving()


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


def test_one_asking_that_comes_twice_is_one():
    """A scheduler tells all processes of a step at once, the supervisor among them, which passes it on."""
    with PreemptionHandler(lambda: False) as leaving:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert leaving()


def test_the_status_that_asks_for_another_start_is_the_systems():
    assert REQUEUE == os.EX_TEMPFAIL
