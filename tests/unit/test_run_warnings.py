"""A warning of any process of a run reaches the terminal once. At the end, a list has all warnings with their counts."""

import io
import logging
import os
import subprocess
import sys
import warnings

import pytest

from mrl.checkpoint.resume import find_resume_point
from mrl.config.hydra_entry import compose_config
from mrl.config.secrets import config_as_json
from mrl.core import run_warnings
from mrl.core.jsonl import write_json
from mrl.core.run_warnings import WARNINGS_VARIABLE, collect_warnings
from mrl.rewards.reward_types import Response
from mrl.rewards.scorer import Scorer
from mrl.rewards.user_function import Function


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv(WARNINGS_VARIABLE, "")
    monkeypatch.setattr(run_warnings, "_forwarding", [])


def test_a_warning_is_shown_once_and_the_end_has_its_count(tmp_path, caplog):
    terminal, log = io.StringIO(), logging.getLogger("mrl.somewhere")
    with caplog.at_level(logging.INFO), collect_warnings(tmp_path, terminal):
        for failed in (1, 2, 3):
            log.warning("%d of 8 responses could not be scored", failed)
        log.error("a checkpoint was not written: %s", OSError("no space"))
        log.info("nothing")
        logging.getLogger("elsewhere").warning("of a library")
        shown = terminal.getvalue()
    assert shown == ("warning: 1 of 8 responses could not be scored\nwarning: a checkpoint was not written: no space\n")
    end = [
        "warnings of this run (4):",
        "  3x 1 of 8 responses could not be scored",
        "  1x a checkpoint was not written: no space",
        "",
    ]
    assert terminal.getvalue() == shown + "\n".join(end)
    assert "\n".join(end[:-1]) in caplog.text, "mrl.log has the list too"


def test_failures_at_one_line_of_the_users_code_are_one_warning(tmp_path):
    terminal, log = io.StringIO(), logging.getLogger("mrl.somewhere")
    with collect_warnings(tmp_path, terminal):
        for text, line in (("'a'", 5), ("'b'", 5), ("'c'", 6)):
            log.warning("3 of 8 responses failed: KeyError: %s (/home/me/mine.py:%d, in score)", text, line)
    assert terminal.getvalue().splitlines() == [
        "warning: 3 of 8 responses failed: KeyError: 'a' (/home/me/mine.py:5, in score)",
        "warning: 3 of 8 responses failed: KeyError: 'c' (/home/me/mine.py:6, in score)",
        "warnings of this run (3):",
        "  2x 3 of 8 responses failed: KeyError: 'a' (/home/me/mine.py:5, in score)",
        "  1x 3 of 8 responses failed: KeyError: 'c' (/home/me/mine.py:6, in score)",
    ]


def test_a_progress_display_that_replaces_stderr_gets_the_warnings(tmp_path, monkeypatch):
    with collect_warnings(tmp_path):
        monkeypatch.setattr(sys, "stderr", display := io.StringIO())
        logging.getLogger("mrl.somewhere").warning("wandb failed")
    assert display.getvalue().startswith("warning: wandb failed\n")


def test_a_run_that_fails_keeps_the_list_for_the_log(tmp_path, caplog):
    terminal = io.StringIO()
    with pytest.raises(KeyError), caplog.at_level(logging.INFO), collect_warnings(tmp_path, terminal):
        logging.getLogger("mrl.somewhere").warning("wandb failed")
        raise KeyError("x")
    assert terminal.getvalue() == "warning: wandb failed\n" and "1x wandb failed" in caplog.text


SIGNAL = """
import logging, os, pathlib, signal, sys
from mrl.core.run_warnings import collect_warnings
log = logging.getLogger("mrl.somewhere")
signal.signal(signal.SIGUSR1, lambda *_: log.warning("the job is preempted"))
class Terminal:
    def write(self, text):
        sys.stderr.write(text)
        if "first" in text:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(1000):
                pass  # Python calls the handler here
    def flush(self):
        sys.stderr.flush()
with collect_warnings(pathlib.Path(sys.argv[1]), Terminal()):
    log.warning("first")
"""


def test_a_signal_handler_may_warn_while_a_warning_is_shown(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.splitlines()[:2] == ["warning: first", "warning: the job is preempted"]


USER = """
import logging, pathlib, sys
from mrl.core.run_warnings import collect_warnings, forward_warnings
run_dir = pathlib.Path(sys.argv[1])
forward_warnings("reward", run_dir)
with collect_warnings(run_dir):
    logging.getLogger("mine").warning("before basicConfig")
    logging.basicConfig(level=logging.INFO, filename=run_dir / "mine.log", format="%(message)s")
    logging.getLogger("mine").info("after basicConfig")
"""


def test_the_users_code_may_configure_logging(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", USER, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "before basicConfig\n"
    assert (tmp_path / "mine.log").read_text() == "after basicConfig\n"


CHILD = """
import logging, sys, warnings
from mrl.core.run_warnings import forward_warnings
forward_warnings("trainer rank 3", sys.argv[1])
forward_warnings("the same process again")
for _ in range(250):
    logging.getLogger("parallel.checkpoint").warning("saved by %s", "another layout")
"""


def test_warnings_of_other_processes_reach_the_terminal(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / run_warnings.WARNINGS_FILE).write_text('{"process": "an earlier start", "text": "old", "count": 1}\n')
    terminal = io.StringIO()
    with collect_warnings(tmp_path, terminal):
        subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=True)
    first, title, counted = terminal.getvalue().splitlines()
    assert first == "warning: trainer rank 3: saved by another layout" and title == "warnings of this run (200):"
    # The file has a line for each of the first 100 warnings, and then a line for every hundred.
    assert counted == "  200x trainer rank 3: saved by another layout"
    assert len((tmp_path / run_warnings.WARNINGS_FILE).read_text().splitlines()) == 102


@pytest.mark.extended
def test_warnings_of_a_users_reward_reach_the_terminal(tmp_path):
    """The reward runs in a worker process that another process owns. Each call warns."""
    (tmp_path / "logs").mkdir()
    source = (
        "import warnings\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    warnings.warn('the table is old')\n    return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(source)
    os.environ[WARNINGS_VARIABLE] = str(tmp_path / run_warnings.WARNINGS_FILE)
    terminal = io.StringIO()
    code = (
        "import sys\nfrom mrl.rewards.scorer import Scorer\nfrom mrl.rewards.user_function import Function\n"
        "from mrl.rewards.reward_types import Response\n"
        "with Scorer(Function(sys.argv[1]), workers=1) as scorer:\n"
        "    assert [s.value for s in scorer([Response('', 'a', 'b')] * 3)] == [1.0] * 3\n"
    )
    with collect_warnings(tmp_path, terminal):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "mine.py")], check=True)
    said = f"reward: UserWarning: the table is old ({tmp_path}/mine.py:3)"
    assert terminal.getvalue() == f"warning: {said}\nwarnings of this run (3):\n  3x {said}\n"


def test_warnings_of_libraries_are_left_alone(tmp_path):
    terminal = io.StringIO()
    with collect_warnings(tmp_path, terminal), warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        run_warnings._install(logging.NullHandler())
        warnings.showwarning("old", DeprecationWarning, warnings.__file__, 3)
        warnings.showwarning("mine", UserWarning, __file__, 4)
    assert f"warning: UserWarning: mine ({__file__}:4)" in terminal.getvalue() and "old" not in terminal.getvalue()
    assert [str(each.message) for each in others] == ["old"]


def test_rewards_that_fail_for_a_share_of_the_responses_are_a_warning(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(solution_str, **_):\n    return float(int(solution_str))\n")
    terminal = io.StringIO()
    with collect_warnings(tmp_path, terminal), Scorer(Function(str(tmp_path / "mine.py")), workers=1) as scorer:
        scorer([Response("", "1", ""), Response("", "x", "")])
        scorer([Response("", "x", "")])
    assert (
        "warning: 1 of 2 responses could not be scored and get the reward 0. One of the reasons: ValueError: invalid"
        in terminal.getvalue()
    )
    assert "mine.py:2, in compute_score" in terminal.getvalue() and "  2x 1 of 2 responses" in terminal.getvalue()


@pytest.mark.extended
def test_a_run_that_is_resumed_with_another_learning_rate_is_a_warning(tmp_path):
    overrides = ["experiment=quickstart", f"run.dir={tmp_path}"]
    write_json(tmp_path / "run.json", dict(command="train", config=config_as_json(compose_config(overrides))))
    terminal = io.StringIO()
    with collect_warnings(tmp_path, terminal):
        find_resume_point(compose_config([*overrides, "optim.lr=0.001", "run.seed=3"]))
    assert "resumed with a changed key: optim.lr: 0.0005 -> 0.001" in terminal.getvalue()
    assert "resumed with a changed key: run.seed: 0 -> 3" in terminal.getvalue()
