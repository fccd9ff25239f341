"""The driver moves no tokens: what it sends and receives is counted while one step of short and one of long responses run."""

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from mrl import build
from mrl.commands import hydra_app
from mrl.config_rules import from_hydra
from mrl.leaving import Leaving
from mrl.plan import plan_training
from mrl.rollout import recording
from mrl.types import TokenBlock

NUM_PROMPTS, GROUP = 5, 3


def write_step(folder, step: int, response_length: int) -> TokenBlock:
    """Recorded rollouts of random tokens; lengths differ from row to row, so that S, R and B are all different."""
    rng = np.random.default_rng(step)
    rows = np.repeat(np.arange(NUM_PROMPTS), GROUP)
    prompts = [prompt for _ in range(NUM_PROMPTS) for prompt in [rng.integers(4, 14, 7).tolist()] * GROUP]
    responses = [rng.integers(4, 14, response_length + i % 3).tolist() for i in range(len(rows))]
    block = TokenBlock.from_lists(prompts, responses, [[-1.0] * len(r) for r in responses])
    columns = dict(truncated=np.zeros(len(rows), bool), weight_versions=np.zeros(len(rows), np.int64))
    recording.write(folder, step, block, rows=rows, groups=np.repeat(np.arange(NUM_PROMPTS), GROUP), **columns)
    return block


class Meter:
    """Counts what Ray serialises and deserialises in this process."""

    def __init__(self) -> None:
        self.bytes, self.values = 0, []

    def attach(self, monkeypatch) -> None:
        from ray._private.serialization import SerializationContext

        send, receive = SerializationContext.serialize, SerializationContext.deserialize_objects

        def serialize(context, value):
            packed = send(context, value)
            self.bytes += packed.total_bytes
            self.values.append(value)
            return packed

        def deserialize(context, packed, refs, *rest):
            values = receive(context, packed, refs, *rest)
            self.bytes += sum(len(p.data or b"") for p in packed)
            self.values += values
            return values

        monkeypatch.setattr(SerializationContext, "serialize", serialize)
        monkeypatch.setattr(SerializationContext, "deserialize_objects", deserialize)

    def arrays(self) -> list[np.ndarray]:
        return [array for value in self.values for array in find_arrays(value)]


def find_arrays(value) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [a for item in value for a in find_arrays(item)] if isinstance(value, (list, tuple)) else []


@pytest.fixture
def trainer(quickstart, tmp_path):
    blocks = [write_step(tmp_path / "rollouts", 0, 4), write_step(tmp_path / "rollouts", 1, 40)]
    more = [
        f"run.dir={tmp_path / 'run'}",
        f"rollout.replay={tmp_path / 'rollouts'}",
        f"rollout.prompts_per_step={NUM_PROMPTS}",
        f"rollout.responses_per_prompt={GROUP}",
        "trainer.max_steps=2",
        "tracking.wandb=false",
        "algorithm.mini_batches=2",  # with the columns of old and reference log-probabilities
        "++algorithm.kl_in_loss.coef=0.01",
        "++algorithm.kl_in_reward.coef=0.01",
    ]
    hydra_app.register_schema()
    with initialize_config_dir(str(hydra_app.CONF), version_base="1.3"):
        config = from_hydra(compose("config", [*quickstart, *more]))
    with build.trainer(plan_training(config), Leaving()) as built:
        yield built, blocks


def test_no_token_passes_through_the_driver(trainer, monkeypatch):
    built, blocks = trainer
    meters = []
    for step, block in enumerate(blocks):
        meter = Meter()
        with monkeypatch.context() as patch:
            meter.attach(patch)
            metrics = built.step(step)
        assert metrics["rollout/tokens"] == block.response_lengths.sum()
        assert set(built.scorers) == {"old_logprobs", "ref_logprobs"} and np.isfinite(metrics["policy/kl_ref"])
        token_columns = {len(block.tokens), len(block.rollout_logprobs)}  # S, R
        assert meter.arrays(), "the meter sees the control plane"
        token_bytes = sum(array.nbytes for array in meter.arrays() if len(array) in token_columns)
        assert token_bytes == 0
        assert not any(isinstance(value, TokenBlock) for value in meter.values)
        meters.append(meter)
    short, long = meters
    assert len(blocks[1].tokens) > 3 * len(blocks[0].tokens)
    assert abs(long.bytes - short.bytes) < 200, "bytes through the driver do not grow with the responses"
