"""What a reward sees and gives."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Response:
    """One sampled response and what its prompt's row says of the answer."""

    data_source: str
    text: str  # decoded, special tokens left out
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


class Reward(Protocol):
    """Any callable of this form can be named in `reward._target_`."""

    def __call__(self, responses: list[Response]) -> list[float]: ...
