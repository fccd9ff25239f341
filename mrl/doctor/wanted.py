"""What a configuration asks of the hosts, as far as they can have it or not."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wanted:
    """What a run needs."""

    gpus: int = 0  # slots of its pools
    cuda: bool = False  # it cannot do without GPUs
    layout: str = ""
    groups: dict[str, list[int]] = field(default_factory=dict)  # of trainer ranks that talk to each other
    model: str | None = None  # folder
    parameters: int = 0
    run_dir: str | None = None
    checkpoint_bytes: int = 0  # still to be written: those that are kept, and one more for a while
    address: str | None = None  # of a Ray cluster that runs already
    engines_take_turns: bool = False  # they give their GPU memory back
    mistakes: list[str] = field(default_factory=list)  # in the configuration
