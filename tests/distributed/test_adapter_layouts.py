"""A push of adapters from every layout sends the same bytes as a push from one process."""

import numpy as np
import pytest
from http_engines import AdapterEngine
from models_for_layouts import make
from safetensors.torch import load_file
from test_lora import ALPHA, ONE, RANK, lora_spec, write_adapters

from models.architecture import ModelSpec
from mrl.config.process_schema import LoraSync, WeightSyncConfig
from mrl.core.types import SyncReport
from mrl.weight_sync.engine_control import adapter_version
from parallel.dims import ParallelDims


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders[kind]` -> (folder of a model, PEFT folder with random adapters)."""
    found = {}
    for kind in ("dense", "moe"):
        folder = tmp_path_factory.mktemp(kind)
        make(kind, folder / "model")
        write_adapters(folder / "adapters", folder / "model")
        found[kind] = folder / "model", folder / "adapters"
    return found


@pytest.fixture
def engine():
    server = AdapterEngine()
    yield server
    server.stop()


def push_twice(rank: int, spec: ModelSpec, url: str, folder: str) -> list[SyncReport]:
    from mrl.workers.actor_critic import MegatronActor

    actor = MegatronActor(spec)
    sync = actor.connect_engines([url], WeightSyncConfig(lora=LoraSync.adapter, timeout_s=20.0), folder)
    first = sync.push(1)
    for param in actor.adapters.params.values():
        param.data.mul_(2)
    second = sync.push(2)
    sync.close()
    return [first, second]


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("dense", ONE),
        ("dense", ParallelDims(tp=2, pp=2)),
        ("dense", ParallelDims(pp=2, vpp=2, dp=2)),
        ("moe", ParallelDims(tp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_every_layout_sends_the_adapters_of_one_process(run_ranks, folders, engine, tmp_path, kind, dims):
    model, adapters = folders[kind]
    reports = run_ranks(dims, push_twice, lora_spec(model, dims, adapters), engine.url, str(tmp_path))
    expected = load_file(adapters / "adapter_model.safetensors")
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    for version, report in enumerate(reports[0], start=1):
        assert adapter_version(report.adapter) == version and report.failed == {}
        assert report.bytes == nbytes and report.tensors == len(expected)
        assert all(other[version - 1] == SyncReport() for other in reports[1:]), "only rank 0 sends"
        found = engine.loaded[report.adapter]
        assert found.keys() == expected.keys()
        different = [n for n in expected if not np.array_equal(found[n].numpy(), version * expected[n].numpy())]
        assert not different, different[:5]
        config = engine.configs[report.adapter]
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
