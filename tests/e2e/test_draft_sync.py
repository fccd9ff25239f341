"""Live weight sync to the draft model of a real SGLang server: a trained MTP layer reaches it, an untrained one stays."""

import hashlib
import json
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


LAYER = "model.layers.2"
OF_LAYER = {  # name of a tensor -> name of the parameter in the draft model
    **{f"{LAYER}.{own}.weight": f"model.{own}.weight" for own in ("enorm", "hnorm", "eh_proj", "shared_head.norm")},
    **{
        f"{LAYER}.{own}": f"model.decoder.{own}"
        for own in ("input_layernorm.weight", "self_attn.o_proj.weight", "mlp.gate.e_score_correction_bias")
    },
}
OF_PREFIX = {
    **{f"mtp.{own}.weight": f"{own}.weight" for own in ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding")},
    "mtp.norm.weight": "model.norm.weight",
    "mtp.layers.0.self_attn.o_proj.weight": "model.layers.0.o_proj.weight",
}
CASES = {
    "glm4_moe": (OF_LAYER, SIZES),
    "deepseek_v3": (OF_LAYER, SIZES),
    "qwen3_next": (OF_PREFIX, SIZES | dict(shared_expert_intermediate_size=32)),
    "qwen3_5": (OF_PREFIX, dict(intermediate_size=64)),
}


def make_model(name: str, folder) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Write a model with an MTP layer. Returns (all tensors, names of the copies of the embedding and the output layer)."""
    make_family(name, folder, **CASES[name][1])
    added = add_mtp_layers(folder)
    if "qwen" in name:  # SGLang reads these fields, which transformers replaces by others
        path = folder / "config.json"
        fields = dict(full_attention_interval=2, partial_rotary_factor=0.5, rope_theta=5000.0, dtype="float32")
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    copies = {key for key in added if key.endswith(("2.embed_tokens.weight", "shared_head.head.weight"))}
    return load_file(folder / "model.safetensors"), copies


@pytest.mark.parametrize("name", CASES)
def test_a_push_reaches_the_draft_model_if_mtp_layers_are_trained(one_rank, tmp_path, name):
    folder = tmp_path / "first"
    loaded, copies = make_model(name, folder)
    trained = {key: tensor + 0.125 for key, tensor in loaded.items()}
    of_mtp = {key for key in loaded if key.startswith((f"{LAYER}.", "mtp."))} - copies
    with engine_with_draft(folder, tmp_path) as server, EngineControl(server.url) as engine:

        def checksums() -> dict[str, str]:
            (found,) = engine.checksums()
            # On a CPU, SGLang stores 1 + weight of some norms in this buffer.
            return {key: value for key, value in found.items() if not key.endswith(".gemma_weight")}

        before = checksums()
        draft = {key for key in before if key.startswith("draft.")}
        shared = {"draft.model.embed_tokens.weight", "draft.lm_head.weight"}
        assert push(server.url, folder, trained, train_mtp=False) == len(loaded) - len(of_mtp) - len(copies)
        untrained = checksums()
        assert {key for key in before if untrained[key] == before[key]} == draft - shared
        for key in shared:
            assert untrained[key] == untrained[key.removeprefix("draft.")] != before[key]

        assert push(server.url, folder, trained, train_mtp=True) == len(loaded) - len(copies)
        after = checksums()
        assert not {key for key in before if after[key] == before[key]}
        for key, own in CASES[name][0].items():
            assert after[f"draft.{own}"] == checksum(trained[key]), key
