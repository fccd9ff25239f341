"""Answers that no step has taken come back to the next process, and no others."""

import numpy as np
import pytest

from mrl.rollout.answers import Answers
from mrl.rollout.client import Completion


def answer(token: int, **more) -> Completion:
    return Completion([token, 2], [-0.5, -0.25], more.pop("finish_reason", "stop"), "7", **more)


def test_what_was_answered_is_there_for_the_next_process(tmp_path):
    experts = np.arange(6, dtype=np.int16).reshape(3, 2, 1)
    first = Answers(tmp_path, 3)
    first.put([0, 1], [[5, 6], [5, 7]], [answer(1), answer(9, routed_experts=experts, cached_tokens=4)])
    first.put([4], [[8]], [answer(3)])
    again = Answers(tmp_path, 3)
    assert len(again) == 3 and again.get(0, [5, 6]) == answer(1) and again.get(4, [8]) == answer(3)
    found = again.get(1, [5, 7])
    assert found and np.array_equal(found.routed_experts, experts) and found.cached_tokens == 4
    again.put([5], [[8]], [answer(4)])
    assert len(Answers(tmp_path, 3)) == 4, "each process adds what it gets"


def test_an_answer_belongs_to_its_number_and_its_tokens(tmp_path):
    Answers(tmp_path, 3).put([0], [[5, 6]], [answer(1)])
    again = Answers(tmp_path, 3)
    assert again.get(1, [5, 6]) is None, "the same prompt, another response"
    assert again.get(0, [5, 6, 1, 2, 9]) is None, "a later turn, or a tool that answered otherwise"
    assert Answers(tmp_path, 9).get(0, [5, 6]) == answer(1), "whatever the step that it is taken up in"


def test_a_process_takes_up_its_own_answers_once_it_reads_them(tmp_path):
    answers = Answers(tmp_path, 3)
    answers.put([0], [[5]], [answer(1)])
    answers.turn(4)
    answers.put([1], [[6]], [answer(2)])
    assert len(answers) == 0
    answers.read()
    assert answers.get(0, [5]) == answer(1) and answers.get(1, [6]) == answer(2)


def test_an_answer_that_was_cut_off_is_none(tmp_path):
    Answers(tmp_path, 3).put([0, 1], [[5], [6]], [answer(1, finish_reason="abort"), answer(2)])
    again = Answers(tmp_path, 3)
    assert again.get(0, [5]) is None and again.get(1, [6]) == answer(2)


@pytest.mark.parametrize("cut", [1, 4, 9, 30])
def test_a_torn_last_record_is_not_read(tmp_path, cut):
    answers = Answers(tmp_path, 3)
    answers.put([0], [[5]], [answer(1)])
    (path,) = tmp_path.iterdir()
    whole = path.stat().st_size
    answers.put([1], [[5]], [answer(2)])
    path.write_bytes(path.read_bytes()[: max(whole, path.stat().st_size - cut)])
    again = Answers(tmp_path, 3)
    assert again.get(0, [5]) == answer(1) and again.get(1, [5]) is None


def test_what_was_answered_in_earlier_steps_is_forgotten(tmp_path):
    Answers(tmp_path, 3).put([0], [[5]], [answer(1)])
    last = Answers(tmp_path, 3)
    last.put([1], [[5]], [answer(1)])
    last.turn(4)
    last.put([2], [[5]], [answer(1)])
    last.forget(4)
    assert len(last) == 0 and len(Answers(tmp_path, 4)) == 1
    last.put([3], [[5]], [answer(1)])
    assert len(Answers(tmp_path, 4)) == 2


def test_a_disk_that_takes_nothing_does_not_end_the_round(tmp_path, caplog):
    answers = Answers(tmp_path / "gone", 3)
    for _ in range(3):
        answers.put([0], [[5]], [answer(1)])
    assert "are not kept" in caplog.text
    answers.forget(9)
