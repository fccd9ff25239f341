"""weight_sync.lora=adapter: requests name the adapters, engines get new adapters beside old ones, mistakes are refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from http_engines import AdapterEngine, HttpEngine, engine_pool
from scripted_lifecycle import scripted_lifecycle
from tiny_families import make_family

from models.architecture import VisionTower
from mrl.commands import plan as plan_command
from mrl.config import hydra_entry
from mrl.config.process_schema import ClusterConfig, LoraSync, WeightSyncConfig
from mrl.controller.plan_adapters import adapter_server_args, check_adapter_sync, check_shared_devices
from mrl.controller.plan_models import check_planned_transport, plan_model
from mrl.controller.plan_tools import plan_sync
from mrl.core.types import SyncReport
from mrl.placement.resource_pools import SlotDemand, make_pools
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.rollout.engine_pool import NoEngineError
from mrl.rollout.engines.server_args import check_synced_args
from mrl.weight_sync.adapter_sync import AdapterSync
from mrl.weight_sync.engine_control import WeightSyncError, adapter_name, adapter_version, push_number
from parallel.trainer_config import LoraConfig

PROMPTS, PARAMS = [[number, 1] for number in range(6)], [SamplingParams(8)] * 6
LORA = LoraConfig(rank=2, alpha=4.0)


def test_the_name_of_adapters_contains_their_version_and_the_number_of_the_push():
    name = adapter_name(12, 34)
    assert (adapter_version(name), push_number(name)) == (12, 34)


# Requests.


@pytest.fixture
def serve():
    """`serve(kind, **settings)` -> a running server."""
    servers: list[HttpEngine] = []

    def start(kind: type[HttpEngine] = HttpEngine, **settings) -> HttpEngine:
        servers.append(kind(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_each_request_names_the_adapters_and_its_completion_has_their_version(serve):
    server = serve()
    with EngineClient(server.url, 20) as client:
        assert client.generate(PROMPTS[:1], PARAMS[:1])[0].weight_version == "3", "as the server reports"
        client.adapter = adapter_name(7, 1)
        (done,) = client.generate(PROMPTS[:1], PARAMS[:1])
    assert server.lora_paths == [None, client.adapter]
    assert done.weight_version == "7" and done.versions == ()


def test_a_pool_uses_the_new_adapters_in_the_next_requests(serve):
    servers = [serve(), serve()]
    with engine_pool(*servers) as pool:
        names = [adapter_name(version, version) for version in (1, 2)]
        for name in names:
            pool.set_adapter(name, pool.urls)
            versions = {done.weight_version for done in pool.generate_all(PROMPTS, PARAMS)}
            assert versions == {str(adapter_version(name))}
    assert [server.lora_paths for server in servers] == [names, names]


def test_an_engine_without_adapters_gets_no_requests(serve):
    old, new = serve(), serve()
    with engine_pool(old, new) as pool:
        for engine in pool.engines:
            engine.needs_adapter = True
        with pytest.raises(NoEngineError, match="has no LoRA adapters yet"):
            pool.generate_all(PROMPTS, PARAMS)
        pool.set_adapter("version_1_1", [old.url])
        assert len(pool.generate_all(PROMPTS, PARAMS)) == 6 and pool.num_in_service == 1
        assert (len(old.inputs), len(new.inputs)) == (6, 0)
        pool.set_adapter("version_1_2", pool.urls)
        pool.generate_all(PROMPTS, PARAMS)
        assert (len(old.inputs), len(new.inputs)) == (9, 3)
    assert new.lora_paths == ["version_1_2"]


# Pushes.


@pytest.fixture
def push_to(monkeypatch, tmp_path):
    """`push_to(*servers, timeout_s=...)` -> (AdapterSync of the only trainer rank, its matrices by name)."""
    monkeypatch.setattr("mrl.weight_sync.adapter_sync.dist.get_rank", lambda: 0)
    opened: list[AdapterSync] = []

    def connect(*servers: HttpEngine, timeout_s: float = 20.0) -> tuple[AdapterSync, dict[str, torch.Tensor]]:
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        matrices = {f"{prefix}.lora_A.weight": torch.randn(2, 5), f"{prefix}.lora_B.weight": torch.randn(7, 2)}
        urls = [server.url for server in servers]

        def gather(consume):
            return consume(matrices.items())

        opened.append(AdapterSync(urls, tmp_path / "weights", gather, LORA, "base", timeout_s))
        return opened[-1], matrices

    yield connect
    for sync in opened:
        sync.close()


def test_each_engine_loads_all_matrices_from_the_folder_of_the_push(serve, push_to):
    servers = [serve(AdapterEngine), serve(AdapterEngine)]
    sync, matrices = push_to(*servers)
    report = sync.push(4)
    assert report.bytes == report.uncompressed_bytes == 4 * (10 + 14), "float32, written once"
    assert (report.tensors, report.buckets, report.failed) == (2, 1, {}) and adapter_version(report.adapter) == 4
    for server in servers:
        (found,) = server.loaded.values()
        assert server.version == "4" and list(server.loaded) == [report.adapter]
        assert found.keys() == matrices.keys() and all(torch.equal(found[n], t) for n, t in matrices.items())
        config = server.configs[report.adapter]
        assert (config["r"], config["lora_alpha"]) == (2, 4)
        assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("tp", [1, 8])
def test_a_request_to_load_adapters_has_no_matrices(serve, push_to, monkeypatch, tp):
    monkeypatch.setattr(AdapterEngine, "server_info", AdapterEngine.server_info | {"tp_size": tp})
    server = serve(AdapterEngine)
    sync, matrices = push_to(server)
    matrices["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"] = torch.zeros(2, 100_000)
    sync.push(1)
    assert server.load_bytes[0] < 1000


def test_the_folders_of_adapters_that_no_engine_has_loaded_are_removed(serve, push_to, tmp_path):
    stale = tmp_path / "weights/version_9_1"  # of an earlier start of the run
    stale.mkdir(parents=True)
    servers = [serve(AdapterEngine), serve(AdapterEngine)]
    sync, _ = push_to(*servers)
    names = [sync.push(version).adapter for version in range(5)]
    assert [push_number(name) for name in names] == [1, 2, 3, 4, 5]
    assert {path.name for path in stale.parent.iterdir()} == set(names[-3:]) == set(servers[0].loaded)
    sync, _ = push_to(*servers)  # the trainer ranks have been restarted
    assert push_number(sync.push(5).adapter) == 6


def test_an_engine_keeps_the_newest_adapters_and_those_that_requests_may_still_use(serve, push_to):
    server = serve(AdapterEngine)
    sync, matrices = push_to(server)
    names = []
    for version in (0, 1, 2, 2, 3):  # the driver pushes a version again after it has replaced an engine
        for tensor in matrices.values():
            tensor += 1
        names.append(sync.push(version).adapter)
        assert list(server.loaded) == names[-3:], "an engine with room for 3 keeps 2 when it gets the next"
    assert server.unloaded == names[:2]
    first_a, last_a = (dict(server.loaded[name]).popitem()[1] for name in (names[2], names[4]))
    torch.testing.assert_close(last_a, first_a + 2, msg="each name keeps the values of its push")


def test_a_push_with_a_lower_version_is_refused(serve, push_to):
    sync, _ = push_to(serve(AdapterEngine))
    sync.push(2)
    with pytest.raises(AssertionError, match="versions only grow"):
        sync.push(1)


def test_an_engine_that_refuses_adapters_is_reported_and_the_others_get_them(serve, push_to):
    good, bad = serve(AdapterEngine), serve(AdapterEngine, refuse=True)
    sync, _ = push_to(good, bad)
    report = sync.push(1)
    assert report.failed == {bad.url: report.failed[bad.url]} and "no room" in report.failed[bad.url]
    assert list(good.loaded) == [report.adapter] and (good.version, bad.version) == ("1", "0")


@pytest.mark.extended
def test_an_engine_whose_requests_still_use_old_adapters_is_reported_before_the_deadline_of_a_push(serve, push_to):
    good, busy = serve(AdapterEngine), serve(AdapterEngine, in_use=True)
    sync, _ = push_to(good, busy, timeout_s=4.0)
    assert [sync.push(version).failed for version in range(3)] == [{}] * 3, "nothing is unloaded while there is room"
    report = sync.push(3)
    assert report.failed.keys() == {busy.url} and "not unload the LoRA adapters version_0_1" in report.failed[busy.url]
    assert "because requests still use them; set a larger weight_sync.timeout_s" in report.failed[busy.url]
    assert list(good.loaded)[-1] == report.adapter and (good.version, busy.version) == ("3", "2")
    assert report.seconds < 4.0


@pytest.mark.extended
def test_an_engine_that_does_not_answer_is_named(serve, push_to):
    server = serve(AdapterEngine)
    server.stop()
    with pytest.raises(WeightSyncError, match="engines do not answer") as caught:
        push_to(server)
    assert caught.value.failed.keys() == {server.url}


def test_a_replaced_engine_gets_the_adapters_before_it_gets_requests():
    reports = iter(
        [
            SyncReport(adapter="version_3_1", failed={"http://b": "died"}, bytes=8, uncompressed_bytes=8),
            SyncReport(adapter="version_3_2", bytes=8, uncompressed_bytes=8),
        ]
    )
    urls = ["http://a", "http://b"]
    lifecycle = scripted_lifecycle(
        lambda version, _: [next(reports)], replace=lambda failed: ["http://a", "http://c"], urls=urls
    )
    metrics = lifecycle.push(3)
    assert lifecycle.engine_processes.adapters == [
        ("version_3_1", ["http://a"]),
        ("version_3_2", ["http://a", "http://c"]),
    ]
    assert (metrics["weight_sync/version"], metrics["weight_sync/bytes"]) == (3, 8)
    assert metrics["weight_sync/replaced_engines"] == 1


# Config.


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models[name]` -> folder of a tiny model."""
    return {name: make_family(name, tmp_path_factory.mktemp(name)) for name in ("qwen3", "qwen3_moe", "deepseek_v3")}


def planned(folder, tmp_path, *overrides):
    """Return the config and the plan of the actor."""
    run = [f"model.path={folder}", f"run.dir={tmp_path / 'run'}", "lora.rank=2", "lora.alpha=4"]
    line = ["experiment=quickstart", *run, "weight_sync.lora=adapter", *overrides]
    config = hydra_entry.compose_config(hydra_entry.check_overrides(line))
    return config, plan_model(config, str(folder))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.rank=0"], r"lora.rank=0, so there are no adapters"),
        (["lora.experts=true"], r"with lora.experts=true: mrl does not send adapters of routed experts"),
        (["rollout.engine_urls=[http://host:1]"], r"with rollout.engine_urls=.*mrl starts them"),
        (["weight_sync.transport=disk"], r"with weight_sync.transport=disk: adapters always travel through a folder"),
        (["weight_sync.delta=true"], r"with weight_sync.delta=true: each push sends the whole"),
        (["weight_sync.pause_mode=in_place"], r"with weight_sync.pause_mode=in_place: a push does not pause"),
        (["+sglang.quantization=fp8"], r"with sglang.quantization=fp8: engines in FP8 start with random weights"),
        (["+sglang.enable_dp_attention=true"], r"with sglang.enable_dp_attention=true: SGLang then loads no"),
        (["lora.targets=[q_proj,o_proj]"], r"adapters of q_proj only together with adapters of v_proj; add v_proj"),
        (["lora.targets=[k_proj,v_proj]"], r"adapters of k_proj only together with adapters of q_proj"),
        (["lora.targets=[o_proj,up_proj]"], r"adapters of up_proj only together with adapters of gate_proj"),
    ],
)
def test_settings_that_cannot_work_are_refused(models, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=r"weight_sync.lora=adapter.*" + message):
        check_adapter_sync(*planned(models["qwen3"], tmp_path, *overrides))


@pytest.mark.extended
def test_matrices_that_sglang_cannot_adapt_are_refused(models, tmp_path):
    with pytest.raises(ValueError, match="mrl sends no adapters to engines of models with latent attention"):
        check_adapter_sync(*planned(models["deepseek_v3"], tmp_path, "lora.targets=[o_proj]"))
    with pytest.raises(
        ValueError, match=r"adapters of down_proj, gate_proj, up_proj of a mixture of experts; .*q_proj"
    ):
        check_adapter_sync(*planned(models["qwen3_moe"], tmp_path))
    check_adapter_sync(*planned(models["qwen3_moe"], tmp_path, "lora.targets=[q_proj,v_proj]"))
    check_adapter_sync(*planned(models["qwen3"], tmp_path))
    check_adapter_sync(*planned(models["deepseek_v3"], tmp_path, "weight_sync.lora=merged"))


@pytest.mark.extended
def test_models_whose_engines_get_no_adapters_are_refused(models, tmp_path):
    config, actor = planned(models["qwen3"], tmp_path)
    tower = VisionTower("tower", {}, image_token=1, merge_size=2, rope_axes=(), repeats={})
    recurrent = actor.arch.transformer | dict(linear_attention_freq=[1, 0])
    for changed, kind in (
        (dict(vision=tower), "image models"),
        (dict(transformer=recurrent), "models with recurrent layers"),
    ):
        with pytest.raises(
            ValueError, match=rf"mrl sends no adapters to engines of {kind}.*; use weight_sync.lora=merged"
        ):
            check_adapter_sync(config, replace(actor, arch=replace(actor.arch, **changed)))


def test_adapters_also_reach_engines_that_weights_on_gpus_cannot_reach():
    pools = make_pools({"all": ["actor", "engines"]}, {"actor": SlotDemand(1), "engines": SlotDemand(2)})
    merged = SimpleNamespace(weight_sync=WeightSyncConfig(), cluster=ClusterConfig(gpus_per_node=2))
    with pytest.raises(ValueError, match="1 of 2 engine ranks share their GPUs"):
        check_planned_transport(merged, pools)
    check_planned_transport(
        SimpleNamespace(**vars(merged) | dict(weight_sync=WeightSyncConfig(lora=LoraSync.adapter))), pools
    )


@pytest.mark.extended
def test_settings_that_hinder_colocated_engines_are_refused(models, tmp_path):
    shared = frozenset([frozenset(["actor", "engines"])])
    for override in (
        "+sglang.enable_weights_cpu_backup=false",
        "rollout.mode=one_step_off",
        "rollout.over_sample_rate=0.5",
    ):
        config, _ = planned(models["qwen3"], tmp_path, override)
        with pytest.raises(ValueError, match=override.lstrip("+").split("=")[0]):
            check_shared_devices(config, shared)
        check_shared_devices(config, frozenset())
    check_shared_devices(planned(models["qwen3"], tmp_path)[0], shared)


def test_a_user_cannot_set_the_arguments_that_mrl_derives_from_the_adapters():
    with pytest.raises(ValueError, match=r"sglang.max_lora_rank=4: mrl sets the arguments"):
        check_synced_args({"max_lora_rank": 4})
    check_synced_args({"lora_backend": "triton"})


@pytest.mark.extended
def test_engines_start_with_room_for_the_adapters_of_all_versions_in_use(models, tmp_path):
    targets = "lora.targets=[q_proj,v_proj,o_proj]"
    config, actor = planned(
        models["qwen3"], tmp_path, targets, "rollout.mode=async", "rollout.max_staleness=2", "+sglang.device=cpu"
    )
    assert adapter_server_args(config, actor) == dict(
        enable_lora=True,
        max_lora_rank=2,
        lora_target_modules=["o_proj", "q_proj", "v_proj"],
        max_loras_per_batch=4,
        lora_backend="torch_native",
    )
    on_gpus = replace(config, sglang=dict(device="cuda"))
    assert "lora_backend" not in adapter_server_args(on_gpus, actor), "SGLang chooses its fastest backend"
    merged, actor = planned(models["qwen3"], tmp_path, "weight_sync.lora=merged")
    assert adapter_server_args(merged, actor) == {}


@pytest.mark.extended
def test_plan_sync_shows_the_bytes_of_a_push_of_adapters(models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the plan writes the input files of the quickstart
    overrides = ["lora.targets=[q_proj,v_proj]", "rollout.num_engines=3", "rollout.engine_tp=2"]
    config, _ = planned(models["qwen3"], tmp_path, *overrides)
    push, hidden, q_rows, v_rows = plan_sync(config).adapters, 32, 64, 32
    nbytes = 4 * 2 * 2 * ((hidden + q_rows) + (hidden + v_rows))
    assert (push.num_matrices, push.nbytes, push.num_readers) == (8, nbytes, 6)
    plan_command.explain_sync(config)
    found = " ".join(capsys.readouterr().out.split())
    assert f"{nbytes:,} bytes: trainer rank 0 writes 8 matrices of LoRA adapters" in found and "6 engine ranks" in found
