"""What a sweep is made of: overrides in Hydra's grammar -> the points, each a list of overrides that one `mrl train` takes."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from mrl.config.overrides import key_of

Point = tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """What is the same in every point, and what is swept."""

    fixed: tuple[str, ...]
    swept: tuple[Override, ...]

    def and_also(self, lines: Sequence[str]) -> "Space":
        """With more overrides, but for keys that have one already."""
        said = {key_of(line) for line in (*self.fixed, *(override.input_line or "" for override in self.swept))}
        more = split([line for line in lines if key_of(line) not in said])
        return Space((*self.fixed, *more.fixed), (*self.swept, *more.swept))

    def points(self) -> list[Point]:
        """Every combination, in the order of the command line: the last key changes fastest; without the fixed part.

        Raises ValueError for an interval, which has no values to go through.
        """
        for override in self.swept:
            if not override.is_discrete_sweep():
                raise ValueError(
                    f"{override.input_line!r}: an interval has no list of values; name some, or set sweep.trials to choose N."
                )
        values = [
            [f"{(override.input_line or '').split('=')[0]}={value}" for value in override.sweep_string_iterator()]
            for override in self.swept
        ]
        return list(itertools.product(*values))


def split(lines: Sequence[str]) -> Space:
    """Overrides of a command line (Hydra's grammar: `a=1,2`, `a=range(1,4)`, `a=choice(x,y)`, `a=interval(0,1)`)."""
    parser, fixed, swept = OverridesParser.create(), [], []
    for line in lines:
        try:
            override = parser.parse_override(line)
        except HydraException as error:
            raise ValueError(f"{line!r} cannot be read: {str(error).splitlines()[0]}") from None
        (swept if override.is_sweep_override() else fixed).append(override)
    return Space(tuple(override.input_line for override in fixed), tuple(swept))


def lines_of(params: Mapping[str, Any]) -> list[str]:
    """`sweep.params` as overrides: a list means its elements."""
    return [f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}" for key, value in params.items()]
