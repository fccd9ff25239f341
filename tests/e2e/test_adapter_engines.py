"""Adapters are pushed to real SGLang servers, which apply them to the base model (weight_sync.lora=adapter)."""

import threading

import pytest
import torch
from live_engines import PROMPTS, max_logprob_difference, num_running, slow_engines
from mrl_runs import wait_until
from safetensors.torch import load_file

from models.conversion.peft_folder import write_peft
from mrl.rollout.client import EngineClient, EngineError, SamplingParams
from mrl.rollout.engines.server_args import adapter_args, default_server_args
from mrl.weight_sync.adapter_sync import AdapterSync
from parallel.trainer_config import LoraConfig

pytestmark = pytest.mark.extended

TOLERANCE = 1e-4
LORA = LoraConfig(rank=4, alpha=8.0)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def random_adapters(folder, seed: int) -> dict[str, torch.Tensor]:
    """Return random matrices A and B for all linear layers of the model in `folder`, by their names in PEFT."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.split(".")[-2] in MATRICES:
            prefix, (rows, columns) = PREFIX + name.removesuffix("weight"), weight.shape
            found[f"{prefix}lora_A.weight"] = torch.randn(LORA.rank, columns, generator=generator) * columns**-0.5
            found[f"{prefix}lora_B.weight"] = torch.randn(rows, LORA.rank, generator=generator) * 0.2
    return found


def merged(folder, adapters: dict[str, torch.Tensor]):
    """Return a Transformers model with the weights W + (alpha / rank) B A."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            prefix = PREFIX + name.removesuffix("weight")
            if (a := adapters.get(f"{prefix}lora_A.weight")) is not None:
                weight += LORA.scale * (adapters[f"{prefix}lora_B.weight"].double() @ a.double()).float()
    return model


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def served(request, qwen3_folder, tmp_path_factory):
    """An engine for adapters, with a prefix cache, as EngineClient."""
    from mrl.rollout.engines.server import EngineServer

    args = adapter_args(LORA.rank, MATRICES, max_adapters=3, device="cpu")
    args |= default_server_args("float32", 512, device="cpu")
    args |= dict(model_path=str(qwen3_folder), tp_size=request.param, disable_radix_cache=False)
    with EngineServer(args, tmp_path_factory.mktemp("adapters") / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        yield EngineClient(server.url, timeout_s=240)


@pytest.fixture
def push(served, qwen3_folder, one_rank, tmp_path):
    """`push(version, adapters)` sends adapters from this process, the only trainer rank, and returns the report."""
    sent: dict[str, torch.Tensor] = {}

    def gather(consume):
        return consume(sent.items())

    sync = AdapterSync([served.url], tmp_path / "weights", gather, LORA, str(qwen3_folder), 60.0)

    def send(version: int, adapters: dict[str, torch.Tensor]):
        sent.clear()
        sent.update(adapters)
        report = sync.push(version)
        assert report.failed == {}
        served.adapter = report.adapter
        return report

    yield send
    sync.close()
    served.adapter = None


def test_the_engine_applies_the_adapters_of_each_push(served, qwen3_folder, push):
    base = merged(qwen3_folder, {})
    assert max_logprob_difference(served, base) < TOLERANCE, "without adapters, the engine serves the base model"
    models, names = [], []
    for version in (1, 2, 3, 4):
        adapters = random_adapters(qwen3_folder, seed=version)
        models.append(merged(qwen3_folder, adapters))
        if version > 1:
            assert max_logprob_difference(served, models[-1]) > 100 * TOLERANCE, "the engine has the old adapters"
        names.append(push(version, adapters).adapter)
        assert max_logprob_difference(served, models[-1]) < TOLERANCE
        assert served.weight_version() == str(version)
        assert served.generate([[5]], SamplingParams(4))[0].weight_version == str(version)
    assert sorted(served.adapters()) == sorted(names[-3:]), "the engine has unloaded the first adapters"
    served.adapter = names[1]
    assert max_logprob_difference(served, models[1]) < TOLERANCE, "an older request keeps its adapters"
    served.adapter = names[0]
    with pytest.raises(EngineError, match="answered 400"):
        served.generate([[5]], SamplingParams(4))
    served.adapter = None
    assert max_logprob_difference(served, base) < TOLERANCE


def test_the_prefix_cache_is_not_used_by_requests_with_other_adapters(served, qwen3_folder, push):
    prompt, sampling = [PROMPTS[8] * 20], SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
    for version in (1, 2):
        push(version, random_adapters(qwen3_folder, seed=10 + version))
        assert [served.generate(prompt, sampling)[0].cached_tokens > 0 for _ in range(2)] == [False, True]


def test_a_running_request_keeps_its_adapters_during_a_push(served, qwen3_folder, push):
    """The push loads the new adapters while the request samples, and the request reports the old version to its end."""
    adapters = random_adapters(qwen3_folder, seed=21)
    model, done = merged(qwen3_folder, adapters), []
    push(1, adapters)
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    request = threading.Thread(target=lambda: done.extend(served.generate([[5, 6, 7]], sampling)))
    with slow_engines(served, pass_s=0.05):
        request.start()
        wait_until(lambda: num_running(served) == 1, 60)
        push(2, random_adapters(qwen3_folder, seed=22))
        assert not done
    request.join(240)
    tokens = torch.tensor([[5, 6, 7] + done[0].token_ids])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, 2:-1].log_softmax(-1).gather(1, tokens[0, 3:, None])[:, 0]
    assert (logprobs - torch.tensor(done[0].logprobs)).abs().max() < TOLERANCE
    assert done[0].weight_version == "1" and done[0].versions == ()


def test_an_engine_refuses_a_truncated_file(qwen3_folder, one_rank, tmp_path, monkeypatch):
    from mrl.rollout.engines.server import EngineServer

    def write_truncated(*args) -> None:
        write_peft(*args)
        path = args[-1] / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-8])

    args = adapter_args(LORA.rank, MATRICES, max_adapters=3, device="cpu") | default_server_args("float32", 512)
    with EngineServer(args | {"model_path": str(qwen3_folder)}, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        adapters = random_adapters(qwen3_folder, seed=1)

        def gather(consume):
            return consume(adapters.items())

        sync = AdapterSync([server.url], tmp_path / "weights", gather, LORA, str(qwen3_folder), 60.0)
        monkeypatch.setattr("mrl.weight_sync.adapter_sync.write_peft", write_truncated)
        report = sync.push(1)
        sync.close()
        assert report.failed.keys() == {server.url}


ADAPTERS = ["lora.rank=8", "lora.alpha=16", "weight_sync.lora=adapter", "optim.lr=5e-3", "trainer.max_steps=3"]


MODES = {
    "sync": [],
    "colocated": ["placement=colocated"],
    "two engines": ["rollout.num_engines=2"],
    "async": ["rollout.mode=async", "rollout.max_staleness=1"],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_three_steps_samples_from_the_adapters_of_each_version(start_mrl, quickstart, mode):
    run = start_mrl("train", *quickstart, *ADAPTERS, *MODES[mode]).finish()
    assert run.process.returncode == 0 and run.leftovers() == [], run.output()
    steps = run.metrics()
    assert [step["step"] for step in steps] == [1, 2, 3]
    stored = load_file(run.folder / "hf/adapter/adapter_model.safetensors")
    assert any(tensor.abs().max() > 1e-3 for name, tensor in stored.items() if "lora_B" in name), "B has left 0"
    for step in steps:
        assert step["weight_sync/bytes"] == sum(tensor.nbytes for tensor in stored.values())
        assert step["weight_sync/version"] == step["step"] and step["weight_sync/replaced_engines"] == 0
        assert step["mismatch/logprob_abs_max"] <= 1e-4 or mode == "async", "trainer and engine use the same adapters"
        assert step["rollout/weight_version"] <= step["step"] - 1


def test_a_lost_engine_is_replaced_and_gets_the_adapters(start_mrl, quickstart):
    """The run goes on with a new engine after SIGKILL of the engine's processes."""
    from mrl_runs import select_processes, signal_all

    run = start_mrl("train", *quickstart, *ADAPTERS, "trainer.max_steps=6")
    wait_until(lambda: (run.folder / "metrics.jsonl").exists() and len(run.metrics()) >= 2)
    signal_all(select_processes(run.tagged(), lambda process: "mrl.rollout.engines.launch_sglang" in process.cmdline()))
    run.finish()
    assert run.process.returncode == 0 and run.leftovers() == [], run.output()
    steps = run.metrics()
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    replaced = sum(step["weight_sync/replaced_engines"] + step["rollout/replaced_engines"] for step in steps)
    assert replaced >= 1
    assert all(step["mismatch/logprob_abs_max"] <= 1e-4 for step in steps)
