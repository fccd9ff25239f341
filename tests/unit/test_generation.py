"""Generations resume, refuse other settings, and use a different seed for each response."""

import asyncio
import json
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from http_engines import BROKEN, HttpEngine
from omegaconf import OmegaConf

from mrl.commands import generate as command
from mrl.config.process_schema import FaultToleranceConfig
from mrl.config.schema import Config, GenerateConfig
from mrl.config.validate import check, from_hydra
from mrl.data.synthetic_tasks import make_doubling_task, write_prompts
from mrl.evaluation import engines as engines_module
from mrl.evaluation.engines import EngineWatcher, engine_pools
from mrl.evaluation.evaluation_prompts import prompts_digest
from mrl.evaluation.generation import Generation, RequestDispatcher, generate
from mrl.evaluation.generation_plan import plan_generation
from mrl.evaluation.response_store import ResponseStore, read_responses
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engines import hosts
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


class LocalServer:
    """Stand-in for EngineServer: an Engine in this process. `limits`: `dies_after` of each server, in the order of starts."""

    limits: ClassVar[list[int | None]] = []
    started: ClassVar[list["LocalServer"]] = []
    was_killed = True

    def __init__(self, server_args, log_path, *, env=None):
        self.server_args, self.log_path = server_args, log_path

    def start(self):
        index = len(self.started)
        self.engine = Engine(dies_after=self.limits[index] if index < len(self.limits) else None)
        self.url = self.engine.url
        self.started.append(self)

    def wait_ready(self, timeout_s):
        pass

    def alive(self):
        return not self.engine.died

    def stop(self, timeout_s=20.0):
        self.engine.stop()

    def cpu_seconds(self):
        return 0.0


@pytest.fixture
def local_servers(monkeypatch):
    """`local_servers(*limits)` lets an engine pool start servers in this process. Returns the list of started servers."""

    def use(*limits):
        monkeypatch.setattr(LocalServer, "limits", list(limits))
        monkeypatch.setattr(LocalServer, "started", [])
        monkeypatch.setattr(hosts, "EngineServer", LocalServer)
        return LocalServer.started

    return use


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


def test_a_finished_generation_says_so_and_starts_nothing(configure, capsys, monkeypatch):
    run(plan_generation(configure()))
    monkeypatch.setattr(EngineServer, "start", lambda self: pytest.fail("an engine was started"))
    command.run_generation(plan_generation(configure()))
    assert "is finished: 51 responses to 17 prompts" in capsys.readouterr().out


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


def test_two_processes_do_not_write_one_folder(configure):
    plan = plan_generation(configure())
    with plan.store, pytest.raises(ValueError, match="another process writes there"):
        plan_generation(configure()).store.__enter__()
    with plan_generation(configure()).store:
        pass


def test_every_response_has_its_own_stable_seed(configure):
    asked = plan_generation(configure()).prompts()
    seeds = {question.seed(0, sample) for question in asked for sample in range(3)}
    assert len(seeds) == 51 and all(0 <= seed < 2**63 for seed in seeds)
    fewer = plan_generation(configure(**{"generate.rows": 2, "generate.output": "elsewhere"})).prompts()
    assert [(q.file_number, q.row) for q in fewer] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    by_place = {(q.file_number, q.row): q for q in asked}
    assert all(q.seed(0, 1) == by_place[q.file_number, q.row].seed(0, 1) for q in fewer)
    assert asked[0].seed(0, 0) != asked[0].seed(1, 0)


def test_concurrent_requests_are_bounded_and_spread_over_engines(configure):
    engines = [Engine(delay_s=0.01) for _ in range(2)]
    run(plan_generation(configure()), *engines, in_flight=5)
    assert all(engine.most <= 5 for engine in engines) and sum(engine.asked for engine in engines) == 51
    assert min(engine.asked for engine in engines) > 10
    most = 64 * (200 // 64)  # at most 64 HTTP requests of 3 prompts each
    wide = Engine(waits_for=most)
    with watched(wide) as watcher:
        plan = plan_generation(configure())
        request = (plan.prompts()[0].tokens, replace(plan.sampling, seed=1))
        pending = RequestDispatcher(watcher, 200).submit([request] * 1000)
        done = [completion for future in pending for completion in future.result()]
    assert len(done) == 1000 and wide.most == most


def test_the_requests_of_an_external_engine_that_fails_go_to_the_others(configure, tmp_path, caplog):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    plan = plan_generation(configure())
    broken, healthy = Engine(delay_s=0.05, dies_after=12), Engine(delay_s=0.05)
    totals = run(plan, broken, healthy, in_flight=4)
    assert totals["responses"] == 51 and bytes_of(plan) == bytes_of(whole)
    assert broken.died and healthy.asked >= 51 - 12
    assert f"engine {broken.url} failed with" in caplog.text and "failed 3 times in a row" in caplog.text


def test_without_an_engine_the_generation_ends_and_keeps_its_files(configure):
    plan = plan_generation(configure())
    with pytest.raises(EngineError, match=r"no engine is left: http://127.*failed 3 times in a row"):
        run(plan, Engine(dies_after=30), in_flight=1)
    assert [plan.store.has(number) for number in range(5)] == [True, True, False, False, False]
    engine = Engine()
    run(plan_generation(configure()), engine)
    assert engine.asked == 51 - 24


def test_engines_that_die_are_replaced_and_the_responses_stay_the_same(configure, tmp_path, local_servers):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    started = local_servers(5, 12, 7)
    keys = {"rollout.num_engines": 2, "generate.requests_in_flight": 4, "fault_tolerance.max_response_attempts": 9}
    plan = plan_generation(configure(**keys))
    generate(plan, Counting(), nullcontext(QUIET))
    assert len(started) >= 5, "two engines died, and so did a replacement"
    assert [server.engine.died for server in started[:2]] == [True, True]
    assert bytes_of(plan) == bytes_of(whole)
    assert [Path(server.log_path).name for server in started[:2]] == ["engine_0.log", "engine_1.log"]


def test_the_only_engine_is_replaced_while_its_requests_wait(configure, local_servers):
    started = local_servers(10)
    plan = plan_generation(configure())
    assert generate(plan, Counting(), nullcontext(QUIET))["responses"] == 51
    assert [server.engine.died for server in started] == [True, False]


def test_the_number_of_replaced_engines_is_limited(configure, local_servers):
    started = local_servers(*[3] * 20)
    plan = plan_generation(configure(**{"fault_tolerance.max_restarts": 2, "generate.requests_in_flight": 2}))
    with pytest.raises(EngineError, match=r"no engine is left; 2 were replaced \(fault_tolerance.max_restarts=2\)"):
        generate(plan, Counting(), nullcontext(QUIET))
    assert sum(server.engine.died for server in started) == 3


def test_a_generation_killed_on_two_engines_is_continued_byte_for_byte(configure, tmp_path, local_servers, monkeypatch):
    whole = plan_generation(configure(**{"generate.output": str(tmp_path / "whole")}))
    run(whole)
    local_servers(6)
    write, keys = ResponseStore.write, {"rollout.num_engines": 2, "generate.requests_in_flight": 3}

    def is_killed_at_three(store, number, rows):
        if number == 3:
            raise KeyboardInterrupt
        write(store, number, rows)

    monkeypatch.setattr(ResponseStore, "write", is_killed_at_three)
    with pytest.raises(KeyboardInterrupt):
        generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))
    monkeypatch.undo()
    started = local_servers(4)
    progress, plan = Counting(), plan_generation(configure(**keys))
    generate(plan, progress, nullcontext(QUIET))
    assert progress.done == progress.total == 51 and bytes_of(plan) == bytes_of(whole)
    assert sum(server.engine.asked for server in started) < 51, "three files were there"


def test_servers_of_one_machine_have_their_own_gpus(configure, local_servers):
    started = local_servers()
    keys = {"rollout.num_engines": 3, "rollout.engine_tp": 2, "sglang": {"device": "cuda", "base_gpu_id": 1}}
    generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))
    assert [server.server_args["base_gpu_id"] for server in started] == [1, 3, 5]
    assert [server.server_args["random_seed"] for server in started] == [0, 1, 2]


def test_small_files_keep_many_engines_busy(configure):
    """A file has 3 responses here, but the engines can sample 32 at once. So several files must be in work at once."""
    engines = [Engine(delay_s=0.2) for _ in range(4)]
    run(plan_generation(configure(**{"generate.prompts_per_file": 1})), *engines, in_flight=8)
    assert sum(engine.most for engine in engines) >= 24


@pytest.fixture
def external(monkeypatch):
    """`external()` -> a running Engine. A server that does not answer within 0.1 s is not used."""
    monkeypatch.setattr(engines_module, "LATE_URL_S", 0.1)
    engines: list[Engine] = []

    def start(**attributes) -> Engine:
        engine = Engine()
        vars(engine).update(attributes)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.stop()


def test_urls_that_do_not_answer_are_left_out_with_a_warning(configure, external, caplog):
    healthy, starting, gone = external(), external(ready_status=503), external()
    gone.stop()
    keys = {"rollout.engine_urls": [gone.url, starting.url, healthy.url, healthy.url + "/"]}
    plan = plan_generation(configure(**keys))
    assert generate(plan, Counting(), nullcontext(QUIET))["responses"] == 51
    assert healthy.asked == 51 and starting.asked == 0
    assert f"{gone.url} is left out: ConnectError" in caplog.text
    assert f"{starting.url} is left out: it answers, but it is not ready" in caplog.text


def test_servers_with_different_keys_and_one_whose_key_is_unknown(configure, external, caplog, monkeypatch):
    monkeypatch.setenv("MRL_ENGINE_KEY", "common-key")
    common, own, strange = external(key="common-key"), external(key="own=key"), external(key="strange-key")
    monkeypatch.setenv("MRL_ENGINE_KEYS", f"{own.url}=own=key http://elsewhere:1=x")
    plan = plan_generation(configure(**{"rollout.engine_urls": [common.url, own.url, strange.url]}))
    assert generate(plan, Counting(), nullcontext(QUIET))["responses"] == 51
    assert common.asked + own.asked == 51 and min(common.asked, own.asked) > 0
    assert (
        f"{strange.url} is left out: EngineError" in caplog.text
        and "set MRL_ENGINE_KEY to this server's key" in caplog.text
    )
    assert "own=key" not in caplog.text


def test_without_a_url_that_answers_nothing_starts(configure, external):
    gone = external()
    gone.stop()
    keys = {"rollout.engine_urls": [gone.url], "cluster.start_timeout_s": 0.3}
    with pytest.raises(EngineError, match=f"rollout.engine_urls: no server takes requests: {gone.url}: ConnectError"):
        generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))


def test_a_url_that_ignores_seeds_is_refused(configure, external):
    deaf = external(server_info={"enable_deterministic_inference": False})
    keys = {"rollout.engine_urls": [external().url, deaf.url]}
    with pytest.raises(ValueError, match=f"{deaf.url} was started without --enable-deterministic-inference"):
        generate(plan_generation(configure(**keys)), Counting(), nullcontext(QUIET))


def test_the_engines_of_a_job_need_a_pool_of_their_own(configure):
    config = configure(**{"rollout.num_engines": 6, "rollout.engine_tp": 2, "placement.pools": {"all": ["actor"]}})
    pools = engine_pools(config)
    assert str(pools) == "engines (12 slots: engines)" and pools.by_role["engines"].demands["engines"].tp_size == 2
    with pytest.raises(ValueError, match="servers that already run need no devices of a cluster"):
        engine_pools(configure(**{"rollout.engine_urls": ["http://host:1"]}))


@pytest.mark.extended_after(5)
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
        ({"data.test": ["no.parquet"]}, "data.test: no.parquet: no such file"),
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
    ],
)
def test_invalid_settings_are_refused_before_anything_starts(configure, overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_generation(configure(**overrides)).prompts()


def test_a_folder_without_a_model_is_refused_with_the_path_to_use(configure, tmp_path):
    run_dir = tmp_path / "trained"
    (run_dir / "checkpoint").mkdir(parents=True)
    (run_dir / "checkpoint/.metadata").touch()
    with pytest.raises(ValueError, match=f"set model.path to {run_dir}/checkpoint"):
        plan_generation(configure(**{"model.path": str(run_dir)}))
    with pytest.raises(ValueError, match=r"neither config nor tokenizer; .*generate\.base=FOLDER"):
        plan_generation(configure(**{"model.path": str(run_dir / "checkpoint")}))


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
