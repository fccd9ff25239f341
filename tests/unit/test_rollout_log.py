"""RolloutLog and CompletionCache return exactly what was written, and survive damaged files and full disks."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rewards.reward_types import Score, Turn
from mrl.rollout import rollout_log
from mrl.rollout.client import Completion
from mrl.rollout.rollout_log import CompletionCache, RolloutLog, sample_digests
from mrl.rollout.trajectory import (
    Group,
    ResponseUsage,
    Sample,
    StepGroups,
    Trajectory,
    driver_columns,
    to_block,
    to_scored_batch,
)

finite = st.floats(-50, 50)
scores = st.builds(
    Score,
    value=finite,
    failure=st.none() | st.text(max_size=20),
    parts=st.dictionaries(st.text(max_size=5), finite, max_size=2),
    gdpo_parts=st.dictionaries(st.text(max_size=5), finite, max_size=2),
)


@st.composite
def trajectories(draw) -> Trajectory:
    length = draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    logprobs = [draw(finite) for _ in tokens]
    routed = np.arange(2 * length, dtype=np.int16).reshape(length, 2, 1) if draw(st.booleans()) else None
    multi_turn = draw(st.booleans())
    return Trajectory(
        tokens,
        logprobs,
        draw(st.booleans()),
        draw(st.integers(0, 10**6)),
        [True] * length if multi_turn else None,
        (Turn("assistant", draw(st.text(max_size=10))),) if multi_turn else (),
        (length - 1,) if multi_turn else (),
        routed,
        ResponseUsage(1, 2, 3, 4, 5) if multi_turn else None,
    )


def group(row: int, responses: list[Trajectory], found: list[Score], greedy: Score | None = None) -> Group:
    pairs = zip(responses, found, strict=True)
    return Group([Sample(row, [1, 2, row], trajectory, score) for trajectory, score in pairs], greedy)


def step_of(*groups: Group, filtered: tuple[Group, ...] = ()) -> StepGroups[Group]:
    """Return a step with these groups, which were drawn one after another."""
    numbers = list(range(40, 40 + len(groups) + len(filtered)))
    return StepGroups(numbers[: len(groups)], list(groups), numbers[len(groups) :], list(filtered), [])


@settings(max_examples=60)
@given(st.data())
def test_every_field_of_a_sample_is_read_back(tmp_path_factory, data):
    log = RolloutLog(tmp_path_factory.mktemp("log"), "key")
    responses, found = [data.draw(trajectories()) for _ in range(4)], [data.draw(scores) for _ in range(4)]
    groups = [group(3, responses[:2], found[:2], data.draw(st.none() | scores)), group(9, responses[2:], found[2:])]
    log.put(7, step_of(groups[0], filtered=(groups[1],)))
    back = log.get(7)
    assert (
        back is not None and [g.row for g in [*back.groups, *back.filtered]] == [3, 9] and back.all_numbers == [40, 41]
    )
    for ours, theirs in zip(groups, [*back.groups, *back.filtered], strict=True):
        assert ours.greedy == theirs.greedy
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert one.score == other.score and one.prompt == other.prompt and one.row == other.row
            mine, yours = vars(one.trajectory).copy(), vars(other.trajectory).copy()
            routed, again = mine.pop("routed_experts"), yours.pop("routed_experts")
            assert mine == yours
            assert (routed is None and again is None) or (routed.dtype == again.dtype and np.array_equal(routed, again))


def plain(row: int, token: int) -> Group:
    return group(row, [Trajectory([token], [-0.5], False, 0)] * 2, [Score(1.0)] * 2)


def test_batches_from_the_log_are_the_same_arrays(tmp_path):
    groups = [plain(1, 5), plain(2, 6)]
    log = RolloutLog(tmp_path, "key")
    log.put(0, step_of(*groups))
    found = log.get(0)
    back = found.groups if found else []
    for ours, theirs in ((to_block(groups), to_block(back)), (to_scored_batch(groups), to_scored_batch(back))):
        for name, value in vars(ours).items():
            assert np.array_equal(value, vars(theirs)[name]) if isinstance(value, np.ndarray) else True, name
    samples = [sample for each in groups for sample in each.samples]
    assert np.array_equal(sample_digests(samples), sample_digests([sample for each in back for sample in each.samples]))
    assert driver_columns(groups).keys() == driver_columns(back).keys()


def test_the_first_writer_of_a_step_wins(tmp_path):
    """A process that outlives its run must not change the responses on which the next process trains."""
    log = RolloutLog(tmp_path, "key")
    first, late = step_of(plain(1, 5)), step_of(plain(1, 6))
    assert log.put(4, first) == first
    assert log.put(4, late) == first
    assert log.get(4) == first


def test_samples_of_other_prompts_are_replaced(tmp_path, caplog):
    log = RolloutLog(tmp_path, "key")
    log.put(4, step_of(plain(1, 5)))
    assert log.put(4, step_of(plain(2, 6))) == step_of(plain(2, 6)) == log.get(4)
    assert "other prompts" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no zstd", b"(\xb5/\xfd"])
def test_a_damaged_entry_is_removed(tmp_path, caplog, content):
    log = RolloutLog(tmp_path, "key")
    log.put(4, step_of(plain(1, 5)))
    next(log.folder.iterdir()).write_bytes(content)
    assert log.get(4) is None and "is damaged" in caplog.text
    assert list(log.folder.iterdir()) == []


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_every_changed_bit_of_an_entry_is_found_and_an_entry_of_another_step_is_not_used(tmp_path, caplog):
    log = RolloutLog(tmp_path, "key")
    log.put(4, step_of(plain(1, 5)))
    content = (log.folder / "step_000004.msgpack.zst").read_bytes()
    for bit in range(8 * len(content)):
        (log.folder / "step_000004.msgpack.zst").write_bytes(flipped(content, bit))
        assert log.get(4) is None
    (log.folder / "step_000005.msgpack.zst").write_bytes(content)
    assert log.get(5) is None and caplog.text.count("or it is the entry of another step") == 8 * len(content) + 1


def test_an_entry_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    log, events = RolloutLog(tmp_path, "key"), []
    link = os.link
    monkeypatch.setattr(rollout_log, "fsync_path", lambda path: events.append(path.name))
    monkeypatch.setattr(rollout_log.os, "link", lambda old, new: (events.append("link"), link(old, new)))
    log.put(4, step_of(plain(1, 5)))
    assert events[0].startswith(".partial-") and events[1:] == ["link", log.folder.name]


def test_steps_before_a_checkpoint_are_deleted_and_cached_completions_stay(tmp_path):
    """The completions may belong to prompts on which no step has trained yet."""
    log = RolloutLog(tmp_path, "key")
    for step in (3, 4, 5):
        log.put(step, step_of(plain(step, 5)))
    for name in (".partial-1234", "step_000004-12ab.completions"):
        (log.folder / name).touch()
    log.discard(before_step=5)
    assert sorted(path.name for path in log.folder.iterdir()) == [
        "step_000004-12ab.completions",
        "step_000005.msgpack.zst",
    ]


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    log = RolloutLog(tmp_path, "key")
    log.folder.rmdir()
    ours = step_of(plain(1, 5))
    assert log.put(0, ours) == ours and "not in the rollout log" in caplog.text


def test_samples_of_other_settings_are_not_read_and_stay_until_a_checkpoint(tmp_path):
    """A user who mistypes a setting, and then starts again with the right setting, loses no samples."""
    ours, mistyped = step_of(plain(1, 5)), step_of(plain(1, 6))
    RolloutLog(tmp_path, "ours").put(4, ours)
    other = RolloutLog(tmp_path, "mistyped")
    assert other.get(4) is None and other.put(4, mistyped) == mistyped
    again = RolloutLog(tmp_path, "ours")
    assert again.get(4) == ours
    again.discard(before_step=4)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"] and again.get(4) == ours


def completion(token: int, **more) -> Completion:
    return Completion([token, 2], [-0.5, -0.25], more.pop("finish_reason", "stop"), "7", **more)


def test_completions_are_there_for_the_next_process(tmp_path):
    experts = np.arange(6, dtype=np.int16).reshape(3, 2, 1)
    first = CompletionCache(tmp_path, 3)
    first.put([0, 1], [[5, 6], [5, 7]], [completion(1), completion(9, routed_experts=experts, cached_tokens=4)])
    first.put([4], [[8]], [completion(3)])
    again = CompletionCache(tmp_path, 3)
    assert len(again) == 3 and again.get(0, [5, 6]) == completion(1) and again.get(4, [8]) == completion(3)
    found = again.get(1, [5, 7])
    assert found and np.array_equal(found.routed_experts, experts) and found.cached_tokens == 4
    again.put([5], [[8]], [completion(4)])
    assert len(CompletionCache(tmp_path, 3)) == 4, "each process adds its completions"


def test_a_completion_belongs_to_its_number_and_its_input_tokens(tmp_path):
    CompletionCache(tmp_path, 3).put([0], [[5, 6]], [completion(1)])
    again = CompletionCache(tmp_path, 3)
    assert again.get(1, [5, 6]) is None, "the same prompt, another response"
    assert again.get(0, [5, 6, 1, 2, 9]) is None, "a later turn, or another tool result"
    assert CompletionCache(tmp_path, 9).get(0, [5, 6]) == completion(1), "in whichever step it is used"


def test_a_process_finds_its_own_completions_after_it_reads_them(tmp_path):
    cache = CompletionCache(tmp_path, 3)
    cache.put([0], [[5]], [completion(1)])
    cache.begin_step(4)
    cache.put([1], [[6]], [completion(2)])
    assert len(cache) == 0
    cache.read()
    assert cache.get(0, [5]) == completion(1) and cache.get(1, [6]) == completion(2)


def test_requests_may_end_while_a_step_begins(tmp_path, monkeypatch):
    cache, count, digest = CompletionCache(tmp_path, 0), 20, rollout_log._digest

    def slow_digest(*args):  # in this time, the other thread begins a step
        time.sleep(0.005)
        return digest(*args)

    monkeypatch.setattr(rollout_log, "_digest", slow_digest)
    ends = threading.Thread(target=lambda: [cache.put([i], [[5]], [completion(i)]) for i in range(count)])
    ends.start()
    for step in itertools.count(1):
        cache.begin_step(step)
        if not ends.is_alive():
            break
    again = CompletionCache(tmp_path, 0)
    assert [again.get(i, [5]) for i in range(count)] == [completion(i) for i in range(count)]


def test_an_aborted_completion_is_not_cached(tmp_path):
    CompletionCache(tmp_path, 3).put([0, 1], [[5], [6]], [completion(1, finish_reason="abort"), completion(2)])
    again = CompletionCache(tmp_path, 3)
    assert again.get(0, [5]) is None and again.get(1, [6]) == completion(2)


@pytest.mark.parametrize("cut", [1, 4, 9, 30])
def test_a_truncated_last_record_is_not_read(tmp_path, cut):
    cache = CompletionCache(tmp_path, 3)
    cache.put([0], [[5]], [completion(1)])
    (path,) = tmp_path.iterdir()
    complete = path.stat().st_size
    cache.put([1], [[5]], [completion(2)])
    path.write_bytes(path.read_bytes()[: max(complete, path.stat().st_size - cut)])
    again = CompletionCache(tmp_path, 3)
    assert again.get(0, [5]) == completion(1) and again.get(1, [5]) is None


@pytest.mark.extended
def test_a_changed_bit_of_a_completion_is_found_and_the_other_completions_are_used(tmp_path, caplog):
    cache = CompletionCache(tmp_path, 3)
    cache.put([0], [[5]], [completion(1)])
    (path,) = tmp_path.iterdir()
    first = path.stat().st_size
    cache.put([1], [[5]], [completion(2)])
    content = path.read_bytes()
    for bit in range(8 * first):
        path.write_bytes(flipped(content, bit))
        caplog.clear()
        again = CompletionCache(tmp_path, 3)
        assert again.get(0, [5]) is None and "damaged or truncated records; their responses are" in caplog.text
        assert bit < 64 or again.get(1, [5]) == completion(2), "the length of the first record is intact"


def test_completions_of_earlier_steps_are_deleted(tmp_path):
    CompletionCache(tmp_path, 3).put([0], [[5]], [completion(1)])
    last = CompletionCache(tmp_path, 3)
    last.put([1], [[5]], [completion(1)])
    last.begin_step(4)
    last.put([2], [[5]], [completion(1)])
    last.discard(4)
    assert len(last) == 0 and len(CompletionCache(tmp_path, 4)) == 1
    last.put([3], [[5]], [completion(1)])
    assert len(CompletionCache(tmp_path, 4)) == 2


def test_a_full_disk_does_not_end_the_sampling(tmp_path, caplog):
    cache = CompletionCache(tmp_path / "gone", 3)
    for _ in range(3):
        cache.put([0], [[5]], [completion(1)])
    assert "are no longer cached" in caplog.text
    cache.discard(9)


def test_a_damaged_recording_is_refused_before_it_is_replayed(tmp_path):
    block = to_block([plain(1, 5), plain(2, 6)])
    for step in range(2):
        rollout_log.write_recording(tmp_path, step, block)
    rollout_log.check_recording(tmp_path, 2)
    path = tmp_path / "step_000001.npz"
    content = path.read_bytes()
    for damaged in (flipped(content, 8 * content.index(block.tokens.tobytes())), content[: len(content) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"step_000001\.npz is damaged \(.*\); record the steps again"):
            rollout_log.check_recording(tmp_path, 2)
