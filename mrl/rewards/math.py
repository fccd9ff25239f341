"""draft"""

from dataclasses import dataclass

from mrl.rewards.base import Response


@dataclass(frozen=True)
class ExactMatch:
    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(r.text.strip() == r.ground_truth) for r in responses]
