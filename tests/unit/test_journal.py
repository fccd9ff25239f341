"""What was sampled comes back from the journal bit by bit, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.rewards.base import Score, Turn
from mrl.rollout.journal import Entry, Journal, digests
from mrl.rollout.trajectory import Group, Sample, Trajectory, Usage, control_columns, to_block, to_scored

finite = st.floats(-50, 50)
scores = st.builds(
    Score,
    value=finite,
    failure=st.none() | st.text(max_size=20),
    parts=st.dictionaries(st.text(max_size=5), finite, max_size=2),
    terms=st.dictionaries(st.text(max_size=5), finite, max_size=2),
)


@st.composite
def trajectories(draw) -> Trajectory:
    length = draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))
    logprobs = [draw(finite) for _ in tokens]
    routed = np.arange(2 * length, dtype=np.int16).reshape(length, 2, 1) if draw(st.booleans()) else None
    several = draw(st.booleans())
    return Trajectory(
        tokens,
        logprobs,
        draw(st.booleans()),
        draw(st.integers(0, 10**6)),
        [True] * length if several else None,
        (Turn("assistant", draw(st.text(max_size=10))),) if several else (),
        (length - 1,) if several else (),
        routed,
        Usage(1, 2, 3, 4, 5) if several else None,
    )


def group(row: int, paths: list[Trajectory], found: list[Score], greedy: Score | None = None) -> Group:
    return Group([Sample(row, [1, 2, row], path, score) for path, score in zip(paths, found, strict=True)], greedy)


def entry(*groups: Group, refused: tuple[Group, ...] = ()) -> Entry:
    """A step that took these groups, which were drawn one after another."""
    numbers = list(range(40, 40 + len(groups) + len(refused)))
    return Entry(numbers[: len(groups)], list(groups), numbers[len(groups) :], list(refused), [])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_everything_of_a_sample_comes_back(tmp_path_factory, data):
    journal = Journal(tmp_path_factory.mktemp("journal"), "key")
    paths, found = [data.draw(trajectories()) for _ in range(4)], [data.draw(scores) for _ in range(4)]
    groups = [group(3, paths[:2], found[:2], data.draw(st.none() | scores)), group(9, paths[2:], found[2:])]
    journal.put(7, entry(groups[0], refused=(groups[1],)))
    back = journal.get(7)
    assert back is not None and back.rows == [3, 9] and back.all_numbers == [40, 41]
    for ours, theirs in zip(groups, [*back.groups, *back.refused], strict=True):
        assert ours.greedy == theirs.greedy
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert one.score == other.score and one.prompt == other.prompt and one.row == other.row
            mine, yours = vars(one.trajectory).copy(), vars(other.trajectory).copy()
            routed, again = mine.pop("routed_experts"), yours.pop("routed_experts")
            assert mine == yours
            assert (routed is None and again is None) or (routed.dtype == again.dtype and np.array_equal(routed, again))


def plain(row: int, token: int) -> Group:
    return group(row, [Trajectory([token], [-0.5], False, 0)] * 2, [Score(1.0)] * 2)


def test_batches_made_of_the_journal_are_the_same_arrays(tmp_path):
    groups = [plain(1, 5), plain(2, 6)]
    journal = Journal(tmp_path, "key")
    journal.put(0, entry(*groups))
    found = journal.get(0)
    back = found.groups if found else []
    for ours, theirs in ((to_block(groups), to_block(back)), (to_scored(groups), to_scored(back))):
        for name, value in vars(ours).items():
            assert np.array_equal(value, vars(theirs)[name]) if isinstance(value, np.ndarray) else True, name
    samples = [sample for each in groups for sample in each.samples]
    assert np.array_equal(digests(samples), digests([sample for each in back for sample in each.samples]))
    assert control_columns(groups).keys() == control_columns(back).keys()


def test_whoever_wrote_first_is_right(tmp_path):
    """A process that outlives its run must not change what the next one trains on."""
    journal = Journal(tmp_path, "key")
    first, late = entry(plain(1, 5)), entry(plain(1, 6))
    assert journal.put(4, first) == first
    assert journal.put(4, late) == first
    assert journal.get(4) == first


def test_samples_of_other_prompts_make_way(tmp_path, caplog):
    journal = Journal(tmp_path, "key")
    journal.put(4, entry(plain(1, 5)))
    assert journal.put(4, entry(plain(2, 6))) == entry(plain(2, 6)) == journal.get(4)
    assert "other prompts" in caplog.text


@pytest.mark.parametrize("content", [b"", b"no zstd", b"(\xb5/\xfd"])
def test_a_torn_entry_is_removed(tmp_path, caplog, content):
    journal = Journal(tmp_path, "key")
    journal.put(4, entry(plain(1, 5)))
    next(journal.folder.iterdir()).write_bytes(content)
    assert journal.get(4) is None and "cannot be read" in caplog.text
    assert list(journal.folder.iterdir()) == []


def test_steps_before_a_checkpoint_are_forgotten(tmp_path):
    """Not what was answered: it may be of prompts that no step has taken."""
    journal = Journal(tmp_path, "key")
    for step in (3, 4, 5):
        journal.put(step, entry(plain(step, 5)))
    for name in (".partial-1234", "step_000004-12ab.answers"):
        (journal.folder / name).touch()
    journal.forget(before=5)
    assert sorted(path.name for path in journal.folder.iterdir()) == [
        "step_000004-12ab.answers",
        "step_000005.msgpack.zst",
    ]


def test_a_disk_that_takes_no_entry_does_not_end_the_run(tmp_path, caplog):
    journal = Journal(tmp_path, "key")
    journal.folder.rmdir()
    ours = entry(plain(1, 5))
    assert journal.put(0, ours) == ours and "not in the journal" in caplog.text


def test_samples_of_other_settings_are_not_seen_and_stay_until_a_checkpoint(tmp_path):
    """A user who mistypes a key, and starts again with the right one, has lost nothing."""
    ours, mistyped = entry(plain(1, 5)), entry(plain(1, 6))
    Journal(tmp_path, "ours").put(4, ours)
    other = Journal(tmp_path, "mistyped")
    assert other.get(4) is None and other.put(4, mistyped) == mistyped
    again = Journal(tmp_path, "ours")
    assert again.get(4) == ours
    again.forget(before=4)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"] and again.get(4) == ours
