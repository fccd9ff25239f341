"""The weights of KL penalties over a run: fixed, or adapting to the KL that was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mrl.algorithms.kl import KLPenalty

MEASURED = {"reward": "policy/kl_reward", "loss": "policy/kl_ref"}
"""Where a penalty stands -> the metric that says how far the policy is from the reference."""


@dataclass
class KLControl:
    """Holds the current coefficients of the penalties in the reward and in the loss."""

    penalties: Mapping[str, KLPenalty]  # by where they stand: "reward", "loss"
    coefs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.coefs = {where: penalty.coef for where, penalty in self.penalties.items()} | self.coefs

    def coef(self, where: str) -> float:
        """The coefficient of the next step; 0 where there is no penalty."""
        return self.coefs.get(where, 0.0)

    def metrics(self) -> dict[str, float]:
        """The coefficients."""
        return {f"policy/kl_coef_{where}": coef for where, coef in self.coefs.items()}

    def adapt(self, metrics: Mapping[str, float], samples: int) -> None:
        """Take note of a step of `samples` responses, in which the policy learned."""
        for where, penalty in self.penalties.items():
            self.coefs[where] = penalty.next_coef(self.coefs[where], metrics[MEASURED[where]], samples)

    def state_dict(self) -> dict[str, float]:
        """The coefficients."""
        return dict(self.coefs)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from where another control was, where coefficients adapt; fixed ones are those of the config."""
        for where, penalty in self.penalties.items():
            if penalty.target is not None:
                self.coefs[where] = state.get(where, self.coefs[where])
