"""Live weight sync to the draft model of a real SGLang server: a trained MTP layer reaches it, an untrained one stays."""

import hashlib
import os
from contextlib import contextmanager
from functools import partial

import draft_plugin
import pytest
import torch
from live_engines import UnshardedModel
from safetensors.torch import load_file
from tiny_families import add_mtp_layers, make_family

from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import WeightSyncConfig
from mrl.weight_sync.engine_control import EngineControl
from mrl.weight_sync.engine_layout import EngineLayout
from mrl.weight_sync.session import LiveSync
from parallel.dims import ParallelDims

pytestmark = pytest.mark.extended

SIZES = dict(intermediate_size=64, moe_intermediate_size=32)  # SGLang pads weights of other sizes on a CPU
SPECULATION = dict(
    speculative_algorithm="EAGLE",
    speculative_num_steps=1,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=2,
)


class TrainedModel(UnshardedModel):
    """An UnshardedModel whose MTP layers are trained, or not."""

    def __init__(self, folder, tensors: dict[str, torch.Tensor], train_mtp: bool) -> None:
        config = HFConfig.load(folder, train_mtp=train_mtp)
        self.family, self.tensors = family_of(config), tensors
        self.arch = self.family.read(config)
        self.dims, self.rows, self.sizes = ParallelDims(), self.family.param_mappings(self.arch), self.arch.sizes


@contextmanager
def engine_with_draft(folder, tmp_path):
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    args = default_server_args("float32", 64) | SPECULATION | {"model_path": str(folder), "random_seed": 0}
    args["speculative_draft_model_path"] = str(folder)
    path = os.pathsep.join(filter(None, [draft_plugin.install(tmp_path / "plugin"), os.environ.get("PYTHONPATH")]))
    with EngineServer(args, tmp_path / "engine.log", env=dict(PYTHONPATH=path)) as server:
        server.wait_ready(timeout_s=480)
        yield server


def push(url: str, folder, tensors: dict[str, torch.Tensor], train_mtp: bool) -> int:
    """Push the weights, and return the number of tensors that were sent."""
    weights = TrainedModel(folder, tensors, train_mtp)
    layout_of = partial(EngineLayout.of, weights.family, weights.arch)
    sync = LiveSync([url], weights, layout_of, WeightSyncConfig(bucket_bytes=1 << 20, timeout_s=60.0))
    try:
        return sync.push(version=1).tensors
    finally:
        sync.close()


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())).hexdigest()[:16]


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_a_push_reaches_the_draft_model_if_mtp_layers_are_trained(one_rank, tmp_path, name):
    folder = make_family(name, tmp_path / "first", **SIZES)
    add_mtp_layers(folder)
    loaded = load_file(folder / "model.safetensors")
    trained = {key: tensor + 0.125 for key, tensor in loaded.items()}
    copies = [key for key in loaded if key.endswith(("2.embed_tokens.weight", "shared_head.head.weight"))]
    of_mtp = [key for key in loaded if key.startswith("model.layers.2.") and key not in copies]
    with engine_with_draft(folder, tmp_path) as server, EngineControl(server.url) as engine:
        (before,) = engine.checksums()
        draft = {key for key in before if key.startswith("draft.")}
        shared = {"draft.model.embed_tokens.weight", "draft.lm_head.weight"}
        assert push(server.url, folder, trained, train_mtp=False) == len(loaded) - len(of_mtp) - len(copies)
        (untrained,) = engine.checksums()
        assert {key for key in before if untrained[key] == before[key]} == draft - shared
        for key in shared:
            assert untrained[key] == untrained[key.removeprefix("draft.")] != before[key]

        assert push(server.url, folder, trained, train_mtp=True) == len(loaded) - len(copies)
        (after,) = engine.checksums()
        assert not {key for key in before if after[key] == before[key]}
        for own in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            assert after[f"draft.model.{own}.weight"] == checksum(trained[f"model.layers.2.{own}.weight"])
        for own in ("input_layernorm.weight", "self_attn.o_proj.weight", "mlp.gate.e_score_correction_bias"):
            assert after[f"draft.model.decoder.{own}"] == checksum(trained[f"model.layers.2.{own}"])
