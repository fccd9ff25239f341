"""Generations resume, refuse other settings, and use a different seed for each response."""

import asyncio
import json
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from http_engines import BROKEN, HttpEngine
from omegaconf import OmegaConf

from mrl.commands import generate as command
from mrl.config.process_schema import FaultToleranceConfig
from mrl.config.schema import Config, GenerateConfig
from mrl.config.validate import check, from_hydra
from mrl.data.synthetic_tasks import make_doubling_task, write_prompts
from mrl.evaluation.engines import EngineWatcher
from mrl.evaluation.evaluation_prompts import prompts_digest
from mrl.evaluation.generation import Generation, RequestDispatcher, generate, plan_generation
from mrl.evaluation.response_store import ResponseStore, read_responses
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.spec import EngineSettings, ServerGroup
from mrl.weight_sync.engine_control import EngineError


class Engine(HttpEngine):
    """A server whose digits depend only on the seed. It records the number of concurrent responses.

    `dies_after`: number of responses after which the server breaks all connections.
    `waits_for`: number of concurrent responses before which the server answers no request.
    """

    def __init__(self, delay_s: float = 0.0, dies_after: int | None = None, waits_for: int = 0) -> None:
        self.dies_after, self.asked, self.now, self.most = dies_after, 0, 0, 0
        self.waits_for, self.reached = waits_for, asyncio.Event()
        super().__init__(delay_s=delay_s)

    @property
    def died(self) -> bool:
        return self.dies_after is not None and self.asked > self.dies_after

    async def generate(self, request):
        count = len((await request.json())["input_ids"])
        self.asked, self.now = self.asked + count, self.now + count
        self.most = max(self.most, self.now)
        if self.most >= self.waits_for:
            self.reached.set()
        await asyncio.wait_for(self.reached.wait(), timeout=60)
        if self.died:
            self.statuses = [BROKEN] * 1000
        try:
            return await super().generate(request)
        finally:
            self.now -= count

    def answers(self, body):
        digits = [str(params["sampling_seed"])[-4:] for params in body["sampling_params"]]
        return [self.of_digits(each, body["return_logprob"]) for each in digits]

    def of_digits(self, digits: str, logprobs: bool) -> dict:
        tokens = [4 + int(digit) for digit in digits] + [2]
        info = dict(finish_reason={"type": "stop"}, weight_version="0")
        if logprobs:
            info["output_token_logprobs"] = [[-0.5, token] for token in tokens]
        return {"output_ids": tokens, "meta_info": info}


class Counting:
    """Records the progress that a generation reports."""

    def begin(self, total, done):
        self.total, self.done = total, done

    def advance(self, responses, tokens):
        self.done += responses


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "inputs"
    make_doubling_task(folder)
    write_prompts(folder / "few.parquet", "few", list(range(3000, 3010)))
    write_prompts(folder / "other.parquet", "other", list(range(4000, 4007)))
    return folder


@pytest.fixture
def configure(inputs, tmp_path):
    """`configure(**{"generate.samples": 3})` -> a Config with this value."""

    def made(**overrides) -> Config:
        base = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
        needed = {
            "run.dir": str(tmp_path / "run"),
            "model.path": str(inputs / "model"),
            "model.dtype": "float32",
            "data.test": [str(inputs / "few.parquet"), str(inputs / "other.parquet")],
            "reward": {"_target_": "mrl.rewards.rule_based.ExactMatch"},
            "algorithm.advantage": {"_target_": "mrl.algorithms.advantages.GRPO"},
            "algorithm.loss": {"_target_": "mrl.algorithms.losses.PPOClip"},
            "rollout.max_response_tokens": 7,
            "generate.samples": 3,
            "generate.prompts_per_file": 4,
            "generate.output": str(tmp_path / "answers"),
        }
        for key, value in (needed | overrides).items():
            OmegaConf.update(base, key, value, force_add=True)
        return from_hydra(base)

    return made


QUIET = SimpleNamespace(begin=lambda *_: None, advance=lambda _: None)


@contextmanager
def watched(*engines, logprobs=False):
    """Yield the watcher of a pool of these external engines."""
    group = ServerGroup(
        name="engine", run_dir="none", arguments={}, model_path="", count=0, tp_size=1, seed=0, max_replacements=1,
        external_urls=tuple(engine.url for engine in engines),
    )  # fmt: skip
    faults = FaultToleranceConfig(engine_stall_timeout_s=30.0)
    settings = dict(fault_tolerance=faults, request_timeout_s=30.0, logprobs=logprobs)
    pool = EnginePool(EngineSettings(engine_group=group, **settings))
    try:
        pool.wait_ready(10)
        with EngineWatcher(pool, 0, 10.0) as watcher:
            yield watcher
    finally:
        pool.close()
        for engine in engines:
            engine.stop()


def run(plan, *engines, in_flight: int = 8, progress=None) -> dict:
    """Do the work of `mrl generate` with external engines."""
    asked = plan.prompts()
    with plan.store as store, watched(*(engines or [Engine()]), logprobs=plan.config.generate.logprobs) as watcher:
        store.check_prompts(prompts_digest(asked))
        dispatcher = RequestDispatcher(watcher, in_flight)
        totals = Generation(plan, asked, dispatcher, progress or Counting()).run()
        store.finish(totals)
    return totals


def bytes_of(plan) -> list[bytes]:
    """Return the content of all parquet files of a generation, in the order of their names."""
    return [path.read_bytes() for path in sorted(plan.store.folder.glob("responses_*.parquet"))]


@pytest.mark.extended
def test_a_generation_holds_every_response_in_order(configure, inputs):
    plan = plan_generation(configure(**{"generate.logprobs": True}))
    totals = run(plan)
    assert (totals["responses"], totals["prompts"], totals["files"]) == (51, 17, 5)
    settings, rows = read_responses(plan.store.folder)
    assert settings["generate.samples"] == 3 and "own seed" in settings["determinism"]
    few, other = str(inputs / "few.parquet"), str(inputs / "other.parquet")
    places = [(few, row) for row in range(10)] + [(other, row) for row in range(7)]
    assert [(r["file"], r["row"], r["sample"]) for r in rows] == [(*p, s) for p in places for s in range(3)]
    first = rows[0]
    assert first["prompt"] == [{"role": "user", "content": "2*3000="}] and first["ground_truth"] == "6000"
    assert first["response"] == "".join(str(t - 4) for t in first["token_ids"][:-1]) and first["num_tokens"] == 5
    assert first["logprobs"] == [-0.5] * 5 and json.loads(first["extra_info"]) == {"split": "few", "index": 0}
    assert first["score"] == float(first["response"] == "6000") and first["failure"] is None and first["parts"] == {}


@pytest.mark.extended
def test_a_resumed_generation_equals_an_uninterrupted_one(configure, tmp_path, monkeypatch):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    plan, write = plan_generation(configure()), ResponseStore.write

    def dies_at_two(store, number, rows):
        if number == 2:
            (store.folder / "responses_000002.parquet.unfinished").write_bytes(b"half a file")
            raise KeyboardInterrupt
        write(store, number, rows)

    monkeypatch.setattr(ResponseStore, "write", dies_at_two)
    with pytest.raises(KeyboardInterrupt):
        run(plan)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"is not finished; run the same `mrl generate` with generate\.output="):
        read_responses(plan.store.folder)
    engine, progress = Engine(), Counting()
    run(plan_generation(configure()), engine, progress=progress)
    assert engine.asked == 27 and progress.done == progress.total == 51, "two files of 4 prompts x 3 were there"
    assert bytes_of(plan) == bytes_of(whole) and len(bytes_of(plan)) == 5
    assert not list(plan.store.folder.glob("*.unfinished"))


@pytest.mark.extended
def test_a_finished_generation_says_so_and_starts_nothing(configure, capsys, monkeypatch):
    run(plan_generation(configure()))
    monkeypatch.setattr(EngineServer, "start", lambda self: pytest.fail("an engine was started"))
    command.run_generation(plan_generation(configure()))
    assert "is finished: 51 responses to 17 prompts" in capsys.readouterr().out


@pytest.mark.extended
def test_other_settings_are_refused_and_named(configure, inputs, tmp_path):
    begun = configure()
    with plan_generation(begun).store:
        pass
    for key, value, shown in [
        ("generate.samples", 4, "generate.samples was 3 and is 4"),
        ("run.seed", 7, "run.seed was 0 and is 7"),
        ("reward._target_", "mrl.rewards.rule_based.GSM8K", "reward was"),
        ("data.test", [str(inputs / "few.parquet")], "data.test was"),
    ]:
        with pytest.raises(ValueError, match=re.escape(shown)):
            plan_generation(configure(**{key: value}))
    plan_generation(configure(**{"rollout.num_engines": 3, "generate.requests_in_flight": 5}))  # not refused
    few, times = inputs / "few.parquet", (inputs / "few.parquet").stat()
    try:
        few.touch()
        with pytest.raises(ValueError, match=f"size and time of {few}"):
            plan_generation(begun)
    finally:
        import os

        os.utime(few, ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="contains other files"):
        plan_generation(configure(**{"generate.output": str(tmp_path / "full")}))


@pytest.mark.extended
def test_other_prompts_of_the_same_files_are_refused(configure, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    keys = {"data.chat_template": str(template), "data.max_prompt_tokens": 7, "data.overlong": "skip"}
    with pytest.raises(EngineError):
        run(plan_generation(configure(**keys)), Engine(dies_after=20), in_flight=1)
    quiet = nullcontext(QUIET)
    template.write_text("{% for message in messages %}1{{ message['content'] }}{% endfor %}")
    with pytest.raises(ValueError, match="was started with other prompts from the same files: the chat template"):
        generate(plan_generation(configure(**keys | {"data.max_prompt_tokens": 20})), Counting(), quiet)
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    run(plan_generation(configure(**keys)))
    assert read_responses(tmp_path / "answers")[0]["data.chat_template"] == str(template)


@pytest.mark.extended
def test_row_number_and_seed_do_not_depend_on_other_rows_and_sets(configure, inputs, tmp_path):
    good = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    lines = [good, None, {"prompt": None}, good | {"prompt": "1+2="}, good | {"prompt": "1+3="}]
    file = tmp_path / "gaps.jsonl"
    file.write_text("".join((json.dumps(line) if line else "") + "\n" for line in lines))
    keys = {"data.test": [str(file)], "data.bad_rows": "skip"}
    alone = plan_generation(configure(**keys)).prompts()
    assert [(q.row, q.messages[0]["content"]) for q in alone] == [(0, "1+1="), (3, "1+2="), (4, "1+3=")]
    few = str(inputs / "few.parquet")
    sets = {"first": [few], "again": {"files": [few], "system": "1+"}}
    beside = plan_generation(configure(**keys, **{"data.test_sets": sets})).prompts()
    assert {(q.set, q.file_in_set, q.file_number) for q in beside} == {("", 0, 0), ("first", 0, 1), ("again", 0, 2)}
    assert [q.seed(0, 1) for q in beside[:3]] == [q.seed(0, 1) for q in alone]
    assert len({q.seed(0, 0) for q in beside}) == len(beside) == 23
    moved = plan_generation(configure(**{"data.test": [], "data.test_sets": sets})).prompts()
    assert [q.seed(0, 0) for q in moved] == [q.seed(0, 0) for q in beside[3:]]


def test_a_held_out_set_with_a_reward_of_its_own_is_scored_by_it(configure, inputs):
    few = str(inputs / "few.parquet")
    own = {"_target_": "mrl.rewards.rule_based.Length", "max_tokens": 20}
    sets = {"short": {"files": [few], "reward": own, "n": 4, "temperature": 0.5}, "same": [few]}
    plan = plan_generation(configure(**{"data.test_sets": sets, "generate.samples": 2}))
    run(plan)
    _, rows = read_responses(plan.store.folder)
    by_set = {name: [row for row in rows if row["set"] == name] for name in ("", "short", "same")}
    assert [len(of_set) for of_set in by_set.values()] == [34, 20, 20], "generate.samples decides, not n of the set"
    assert all(row["score"] == 1 - row["num_tokens"] / 20 for row in by_set["short"])
    assert all(row["score"] == float(row["response"] == row["ground_truth"]) for row in by_set["same"] + by_set[""])
    assert {(row["ability"], row["style"]) for row in rows} == {("math", "rule")}


def test_a_row_that_the_reward_cannot_score_is_refused(configure):
    by_source = {
        "_target_": "mrl.rewards.by_source.BySource",
        "rewards": {"sums": {"_target_": "mrl.rewards.rule_based.GSM8K"}},
    }
    plan = plan_generation(configure(reward=by_source))
    with pytest.raises(
        ValueError, match=r"few.parquet, row 0, column 'data_source': no pattern .* data_source 'doubling'"
    ):
        plan.prompts()
    assert len(plan_generation(configure(reward=by_source, **{"generate.score": False})).prompts()) == 17


@pytest.mark.extended
def test_two_processes_do_not_write_one_folder(configure):
    plan = plan_generation(configure())
    with plan.store, pytest.raises(ValueError, match="another process writes there"):
        plan_generation(configure()).store.__enter__()
    with plan_generation(configure()).store:
        pass


@pytest.mark.extended
def test_every_response_has_its_own_stable_seed(configure):
    asked = plan_generation(configure()).prompts()
    seeds = {question.seed(0, sample) for question in asked for sample in range(3)}
    assert len(seeds) == 51 and all(0 <= seed < 2**63 for seed in seeds)
    fewer = plan_generation(configure(**{"generate.rows": 2, "generate.output": "elsewhere"})).prompts()
    assert [(q.file_number, q.row) for q in fewer] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    by_place = {(q.file_number, q.row): q for q in asked}
    assert all(q.seed(0, 1) == by_place[q.file_number, q.row].seed(0, 1) for q in fewer)
    assert asked[0].seed(0, 0) != asked[0].seed(1, 0)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"generate.temperature": 0.0},
            "generate.samples=3 with generate.temperature=0: with temperature 0 all samples are equal",
        ),
        ({"generate.temperature": -1.0}, "generate.temperature=-1.0: must be 0 or more"),
        ({"generate.top_p": 1.5}, "generate.top_p=1.5"),
        ({"generate.rows": 0}, "generate.rows=0: must be 1 or more"),
        ({"generate.samples": 1001}, "at most 1000"),
        ({"evaluate.confidence": 1.0}, "evaluate.confidence=1.0: must be greater than 0"),
        ({"evaluate.k": [0]}, "evaluate.k=[0]"),
        ({"data.test": []}, "data.test and data.test_sets are empty"),
        ({"data.test": ["no.parquet"]}, "data.test or data.test_sets: no.parquet: no such file"),
        ({"generate.base": "base"}, "is only for a Megatron checkpoint"),
        ({"sglang": {"enable_deterministic_inference": False}}, "use generate.deterministic"),
        ({"sglang": {"mem_fraction": 1}}, "did you mean sglang.mem_fraction_static?"),
        ({"reward": {"_target_": "mrl.rewards.rule_based.ExactMatc"}}, "cannot be imported"),
        (
            {"reward": {"_target_": "mrl.rewards.remote_models.Judge", "role": "judge", "model": "judge"}},
            "reward: calls roles.judge, which only `mrl train` serves",
        ),
        (
            {
                "data.test_sets": {
                    "s": {
                        "files": ["no.parquet"],
                        "reward": {"_target_": "mrl.rewards.remote_models.Judge", "role": "judge"},
                    }
                }
            },
            "data.test_sets.s.reward: calls roles.judge, which only `mrl train` serves",
        ),
        ({"rollout.max_response_tokens": 64}, "leaves no room for a prompt"),
        (
            {
                "model.dtype": "bfloat16",
                "sglang": {"device": "cuda", "dtype": "float32"},
                "generate.deterministic": False,
            },
            "sglang.dtype=float32: on GPUs, SGLang 0.5.23 normalizes float32 only in deterministic inference",
        ),
    ],
)
def test_invalid_settings_are_refused_before_anything_starts(configure, overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_generation(configure(**overrides)).prompts()


def test_the_dtype_of_engines_may_differ_from_the_dtype_of_the_model(configure):
    on_gpus = {"sglang": {"device": "cuda", "dtype": "bfloat16"}, "generate.deterministic": False}
    assert plan_generation(configure(**on_gpus)).server_args["dtype"] == "bfloat16"


@pytest.mark.extended
def test_a_folder_without_a_model_is_refused_with_the_path_to_use(configure, tmp_path):
    run_dir = tmp_path / "trained"
    (run_dir / "checkpoint").mkdir(parents=True)
    (run_dir / "checkpoint/.metadata").touch()
    with pytest.raises(ValueError, match=f"set model.path to {run_dir}/checkpoint"):
        plan_generation(configure(**{"model.path": str(run_dir)}))
    with pytest.raises(ValueError, match=r"neither config nor tokenizer; .*generate\.base=FOLDER"):
        plan_generation(configure(**{"model.path": str(run_dir / "checkpoint")}))


@pytest.mark.extended
def test_a_megatron_checkpoint_is_served_as_the_model_it_came_from(configure, inputs, tmp_path):
    from safetensors.torch import load_file

    from models.conversion import convert_checkpoint
    from models.hf_config import HFConfig

    quiet = SimpleNamespace(begin=lambda *_: None, advance=lambda _: None)
    convert_checkpoint.to_megatron(HFConfig.load(inputs / "model"), tmp_path / "megatron", quiet)
    keys = {"model.path": str(tmp_path / "megatron"), "generate.base": str(inputs / "model")}
    plan = plan_generation(configure(**keys))
    assert len(plan.prompts()) == 17, "tokenizer and context are those of the base"
    served = plan.model.prepare_engine_folder(tmp_path / "served", nullcontext(quiet))
    found, expected = (load_file(folder / "model.safetensors") for folder in (served, inputs / "model"))
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
    next((tmp_path / "megatron").glob("*.distcp")).touch()
    assert plan_generation(configure(**keys)).store.settings != plan.store.settings


def test_greedy_decoding_needs_one_sample():
    check_only = GenerateConfig(temperature=0.0, samples=1)
    check(Config(generate=check_only))
