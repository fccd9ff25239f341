"""`mrl evaluate evaluate.harness=...` with a stand-in for lm_eval: its command line, the endpoint and the results."""

import json
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from http_engines import BROKEN, HttpEngine
from omegaconf import OmegaConf

from models.families import family_of
from mrl.commands import evaluate as command
from mrl.config.schema import Config
from mrl.config.secrets import authorization
from mrl.config.validate import from_hydra
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.evaluation import engines
from mrl.evaluation.generation import SampledModel, plan_generation
from mrl.evaluation.harness import OpenAIEndpoint, plan_harness, read_results, run_harness
from mrl.rollout.client import EngineError

PROGRAM = """#!{python}
import json, os, sys, urllib.request
from pathlib import Path
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
model = dict(pair.split("=", 1) for pair in options["--model_args"].split(","))
answers = []
for number in range(int(options["--limit"])):
    body = json.dumps(dict(prompt=[[number, 1]], model=model["model"])).encode()
    headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    with urllib.request.urlopen(urllib.request.Request(model["base_url"], body, headers)) as answer:
        answers.append(json.load(answer)["choices"][0]["text"])
folder = Path(options["--output_path"], model["model"])
folder.mkdir(parents=True, exist_ok=True)
metrics = {{"alias": "tiny", "acc,none": 0.25, "acc_stderr,none": 0.125, "f1,strict": 0.5, "f1_stderr,strict": "N/A"}}
report = dict(results=dict(tiny=metrics), argv=sys.argv[1:], answers=answers)
report["n-samples"] = dict(tiny=dict(original=8, effective=len(answers)))
(folder / "results_2025-01-31.json").write_text(json.dumps(report))
sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""


class CompletionsEngine(HttpEngine):
    """Answers requests of OpenAI's completions API. `bodies` are the bodies of the requests."""

    def __init__(self, **settings) -> None:
        self.bodies: list[dict] = []
        super().__init__(**settings)

    async def generate(self, request):
        self.bodies.append(await request.json())
        return await super().generate(request)

    def answers(self, body):
        return {"choices": [{"index": 0, "text": str(body["prompt"][0][0] + 1)}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "inputs"
    make_doubling_task(folder)
    return folder / "model"


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "bin/lm_eval"
    path.parent.mkdir()
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def configure(tmp_path, model, program):
    """`configure(harness, **overrides)` -> Config. By default, the stand-in for lm_eval asks for four completions."""

    def made(harness: str | None = None, **overrides) -> Config:
        base = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
        needed = {
            "run.dir": str(tmp_path / "run"),
            "model.path": str(model),
            "model.dtype": "float32",
            "reward": {"_target_": "mrl.rewards.rule_based.ExactMatch"},
            "algorithm.advantage": {"_target_": "mrl.algorithms.advantages.GRPO"},
            "algorithm.loss": {"_target_": "mrl.algorithms.losses.PPOClip"},
            "evaluate.harness": harness or f"{program} --tasks tiny --limit 4",
        }
        for key, value in (needed | overrides).items():
            OmegaConf.update(base, key, value, force_add=True)
        return from_hydra(base)

    return made


@contextmanager
def serving(*servers):
    try:
        yield [server.url for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.mark.extended
def test_the_harness_asks_the_engines_and_its_results_are_reported(configure, tmp_path, capfd):
    servers = [CompletionsEngine(), CompletionsEngine()]
    with serving(*servers) as urls:
        command.evaluate_or_submit(configure(**{"rollout.engine_urls": urls}))
    bodies = [body for server in servers for body in server.bodies]
    assert sorted(body["prompt"][0][0] for body in bodies) == [0, 1, 2, 3]
    report = json.loads((tmp_path / "run/evaluation.json").read_text())
    raw = json.loads(Path(report["harness"]["file"]).read_text())
    assert raw["answers"] == ["1", "2", "3", "4"], "the endpoint returns what the engines answer"
    accuracy, f1 = report["harness"]["results"]
    assert (accuracy["task"], accuracy["metric"], accuracy["samples"]) == ("tiny", "acc,none", 4)
    assert accuracy["value"] == pytest.approx(
        dict(value=0.25, low=0.25 - 1.96 * 0.125, high=0.25 + 1.96 * 0.125), abs=1e-4
    )
    assert f1["value"] == dict(value=0.5, low=None, high=None)
    assert "0.250 [0.005, 0.495]" in capfd.readouterr().out
    assert (tmp_path / "run/evaluation.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_line_names_endpoint_model_and_tokenizer(configure, model, tmp_path):
    plan = plan_harness(configure(**{"rollout.num_engines": 3, "generate.requests_in_flight": 10}))
    line = plan.command_line("http://127.0.0.1:5/v1")
    assert line[1:5] == ["--tasks", "tiny", "--limit", "4"]
    options = dict(zip(line[5:-1:2], line[6:-1:2], strict=True))
    arguments = dict(pair.split("=") for pair in options["--model_args"].split(","))
    assert options["--model"] == "local-completions" and options["--output_path"] == str(tmp_path / "run/harness")
    assert arguments["base_url"] == "http://127.0.0.1:5/v1/completions" and arguments["tokenizer"] == str(model)
    assert arguments["num_concurrent"] == "30" and arguments["max_length"] == str(plan.model.context)
    assert line[-1] == "--log_samples"
    server_args = plan.server_args
    assert server_args["skip_tokenizer_init"] is False and "custom_weight_loader" not in server_args


def test_weights_that_an_interrupted_evaluation_has_converted_are_not_evaluated(configure, monkeypatch, tmp_path):
    def prepare(model, scratch, progress):
        assert not scratch.exists()
        raise EngineError("stop here")

    monkeypatch.setattr(SampledModel, "prepare_engine_folder", prepare)
    (tmp_path / "run/harness_model").mkdir(parents=True)
    with pytest.raises(EngineError, match="stop here"):
        run_harness(plan_harness(configure()), nullcontext())


@pytest.mark.extended
def test_a_failed_harness_ends_the_command(configure, monkeypatch, capfd):
    monkeypatch.setenv("FAKE_STATUS", "3")
    with serving(CompletionsEngine()) as urls, pytest.raises(SystemExit) as ended:
        command.evaluate_or_submit(configure(**{"rollout.engine_urls": urls}))
    assert ended.value.code == 1 and "lm_eval ended with status 3" in capfd.readouterr().err


@pytest.mark.extended
def test_requests_of_the_harness_go_to_the_other_engine_when_one_fails(configure, tmp_path):
    servers = [CompletionsEngine(statuses=(BROKEN,) * 9), CompletionsEngine()]
    with serving(*servers) as urls:
        command.evaluate_or_submit(configure(**{"rollout.engine_urls": urls}))
    report = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert json.loads(Path(report["harness"]["file"]).read_text())["answers"] == ["1", "2", "3", "4"]


@pytest.mark.extended
def test_the_endpoint_requires_the_engine_key_and_passes_refusals_on(configure):
    config = configure()
    with serving(CompletionsEngine(statuses=(400,))) as urls:
        config = configure(**{"rollout.engine_urls": urls})
        plan = plan_harness(config)
        group = engines.engine_group(config, plan.server_args, plan.model.folder)
        with engines.running_engines(config, group) as watcher, OpenAIEndpoint(watcher, 4) as endpoint:
            body = dict(prompt=[[5]])
            refused = httpx.post(f"{endpoint.url}/completions", json=body)
            assert refused.status_code == 401 and "MRL_ENGINE_KEY" in refused.text
            passed_on = httpx.post(f"{endpoint.url}/completions", json=body, headers=authorization())
            assert passed_on.status_code == 400 and "out of tokens" in passed_on.text
            answer = httpx.post(f"{endpoint.url}/completions", json=body, headers=authorization())
            assert answer.json()["choices"][0]["text"] == "6"


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("harness", "keys", "message"),
    [
        (
            "no_such_folder/lm_eval --tasks x",
            {},
            "is not installed here. mrl does not install lm_eval. Install it in an environment",
        ),
        ("{python} -m lm_eval --tasks x", {}, r"python\S* has no module lm_eval\. mrl does not install lm_eval"),
        ("helm run", {}, "expected the command line of lm_eval"),
        ("{program} --limit 4", {}, "names no tasks; add --tasks"),
        ("{program} --tasks x --model hf", {}, "mrl sets the option --model; remove it"),
        ("{program} --tasks x --output_path=there", {}, "mrl sets the option --output_path; remove it"),
        ("{program} --tasks 'x", {}, "quote it as in a shell"),
        (None, {"evaluate.input": "answers"}, "evaluate.input with evaluate.harness"),
        (None, {"model.path": "/nowhere"}, "/nowhere"),
        (None, {"sglang": {"mem_fraction": 1}}, "did you mean sglang.mem_fraction_static?"),
        (
            None,
            {
                "model.dtype": "bfloat16",
                "sglang": {"device": "cuda", "dtype": "float32"},
                "generate.deterministic": False,
            },
            r"sglang\.dtype=float32: on GPUs",
        ),
    ],
)
def test_mistakes_are_found_before_an_engine_starts(configure, program, harness, keys, message):
    with pytest.raises(ValueError, match=message):
        plan_harness(configure(harness and harness.format(program=program, python=sys.executable), **keys))


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("plan", [plan_generation, plan_harness])
def test_a_model_without_kernels_for_a_cpu_is_refused_unless_its_engines_run_already(
    configure, model, monkeypatch, plan
):
    monkeypatch.setattr(f"{plan.__module__}.family_of", lambda hf: replace(family_of(hf), engine_needs_gpu=True))
    keys = {"sglang": {"device": "cpu"}, "data.test": [str(model.parent / "test.parquet")]}
    with pytest.raises(ValueError, match=r"model\.path: SGLang .* for Qwen3ForCausalLM on a CPU; use GPUs\.$"):
        plan(configure(**keys))
    plan(configure(**keys, **{"rollout.engine_urls": ["http://host:1"]}))


def test_metrics_of_groups_have_no_number_of_samples():
    content = {
        "results": {"mmlu": {"alias": "mmlu", "acc,none": 0.5, "acc_stderr,none": 0.01, " ": " "}},
        "n-samples": {},
    }
    (result,) = read_results(content, 0.95)
    assert (result.task, result.samples, result.value.value) == ("mmlu", None, 0.5)
