"""From what was seen of all processes to the sentence that says whom the others wait for: pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mrl.hang_report.probe import Seen
from parallel.collective_log import LastCollective

SHOWN_NOTES = 3
ABORTED = "Aborted"  # how NCCL's watchdog ends a rank that waited too long for another one
SILENT = "ended without a word: killed (SIGKILL, perhaps for want of memory), or it left by itself (os._exit)"


@dataclass(frozen=True)
class Verdict:
    """Who keeps the others waiting, and what everyone asked is doing."""

    culprits: tuple[Seen, ...]  # empty: nobody stands out
    sentence: str


def judge(everyone: Sequence[Seen], asked: Callable[[Seen], bool]) -> Verdict:
    """`asked`: who was called and has not answered.

    The first of these that there are is to blame: those asked that died, unless they gave up waiting for one that lives; others
    that died; the stopped; those asked that do not wait; those that wait for something else than other ranks; those that have
    entered fewer collectives; those that have nothing to do though the call has not ended.
    """
    waiting = [seen for seen in everyone if asked(seen)]
    culprits = _culprits(everyone, waiting)
    others = [seen for seen in waiting if seen not in culprits]
    parts = [tell(seen, behind(seen, everyone)) for seen in culprits]
    parts += [f"{_titles(group)} {_plural(where, group)}" for where, group in _alike(others)]
    return Verdict(tuple(culprits), "; ".join(parts) or "no process of the run was found")


def _culprits(everyone: Sequence[Seen], waiting: Sequence[Seen]) -> list[Seen]:
    aborted = [seen for seen in waiting if seen.crash == ABORTED]
    kinds: list[tuple[Sequence[Seen], Callable[[Seen], bool]]] = [
        (waiting, lambda seen: seen.dead and seen.crash != ABORTED),
        (waiting, lambda seen: not seen.dead and _works(seen) and bool(behind(seen, aborted))),
        (waiting, lambda seen: seen.dead),
        (everyone, lambda seen: seen.dead),
        (everyone, lambda seen: seen.stopped),
        (waiting, _works),
        (waiting, lambda seen: seen.place.waits_for not in ("", "other ranks", "a call")),
        (waiting, lambda seen: bool(behind(seen, everyone))),
        (waiting, lambda seen: seen.place.waits_for == "a call"),
    ]
    for candidates, guilty in kinds:
        if found := [seen for seen in candidates if guilty(seen)]:
            return found
    return []


def _works(seen: Seen) -> bool:
    return bool(seen.stacks) and not seen.place.waits_for


def tell(seen: Seen, lag: str = "") -> str:
    """What there is to say of one process, in a sentence."""
    now = f" while {_doing(seen)}" if seen.notes and not seen.dead else ""
    return f"{seen.title} {_words(seen)}{now}{lag}"


def _words(seen: Seen) -> str:
    if seen.dead:
        return f"died{f' while {_doing(seen)}' if seen.notes else ''}: {seen.crash or SILENT}"
    if seen.stopped:
        return f"is {seen.state} (pid {seen.record.pid}; `kill -CONT` lets it go on)"
    return f"{seen.place}" if seen.stacks else f"is {seen.state} and does not say where"


def behind(seen: Seen, everyone: Sequence[Seen]) -> str:
    """Where a rank has entered fewer collectives than other members of a group; "" where it has not."""
    lags = []
    for mine in seen.collectives:
        others = [
            theirs for other in everyone if other.record.group == seen.record.group for theirs in _same(mine, other)
        ]
        ahead = max((theirs.entered for theirs in others), default=0)
        if ahead > mine.entered:
            lags.append(
                f"has entered {mine.entered} collectives of {name_of(mine)} and others {ahead} (the last: "
                f"{next(_said(theirs) for theirs in others if theirs.entered == ahead)})"
            )
    return f"; it {'; it '.join(lags)}" if lags else ""


def _same(mine: LastCollective, other: Seen) -> list[LastCollective]:
    return [theirs for theirs in other.collectives if (theirs.group, theirs.ranks) == (mine.group, mine.ranks)]


def name_of(last: LastCollective) -> str:
    """A process group in words."""
    ranks = ", ".join(map(str, last.ranks[:8])) + (", ..." if len(last.ranks) > 8 else "")
    purpose = last.purpose.lower().replace("_", " ").replace(" group", "").replace("model parallel", "parallel")
    return f"group {purpose if purpose not in ('', 'undefined') else last.group} (ranks {ranks})"


def _said(last: LastCollective) -> str:
    return f"{last.operation}, {size(last.nbytes)}"


def size(nbytes: int) -> str:
    """Bytes for reading."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"


def _doing(seen: Seen) -> str:
    return ", ".join(note.text for note in seen.notes[-SHOWN_NOTES:])


def _alike(seen: Sequence[Seen]) -> list[tuple[str, list[Seen]]]:
    """Processes by what they do, each model's and each kind apart: (what is said of them, who)."""

    def key(one: Seen) -> tuple[str, ...]:
        place = (one.place.purpose, one.place.waits_for) if one.stacks else (one.state,)
        return (*place, one.record.role, one.record.group)

    return [(_common(alike), alike) for alike in (list(part) for _, part in groupby(sorted(seen, key=key), key))]


def _common(seen: Sequence[Seen]) -> str:
    """What is said of all these; without file and line where those differ."""
    words = [_words(one) for one in seen]
    return words[0] if len(set(words)) == 1 else words[0].partition(" (")[0]


def _titles(seen: Sequence[Seen]) -> str:
    if len(seen) == 1 or seen[0].record.role != "rank":
        return ", ".join(one.title for one in seen)
    group = f"{seen[0].record.group} " if seen[0].record.group else ""
    return f"{group}ranks {ranges(sorted(one.record.rank for one in seen))}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers for reading: 0-2, 4, 6-7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _plural(words: str, seen: Sequence[Seen]) -> str:
    if len(seen) == 1:
        return words
    verb, _, rest = words.partition(" ")
    return f"{ {'is': 'are', 'waits': 'wait', 'has': 'have'}.get(verb, verb) } {rest}"
