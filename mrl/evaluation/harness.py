"""Runs the tasks of lm-evaluation-harness with mrl's engines (`evaluate.harness`).

The user installs the harness in a separate environment. mrl starts engines and an endpoint with OpenAI's API, runs the harness as
a child process, and reads the results file.
"""

import asyncio
import hmac
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from models.conversion.resumable_folder import ByteProgress
from models.families import family_of
from mrl.config.schema import Config
from mrl.config.secrets import authorization, engine_key
from mrl.controller.plan_engine_dtype import check_engine_device, check_engine_dtype
from mrl.evaluation.engines import EngineWatcher, engine_group, running_engines
from mrl.evaluation.evaluation_summary import IntervalEstimate
from mrl.evaluation.generation import CONVERTED_FOLDER_NAME, SampledModel, find_model
from mrl.rollout.client import EngineError
from mrl.rollout.engine_pool import deadline_error
from mrl.rollout.engines.server_args import DETERMINISTIC, check_server_args, default_server_args

if TYPE_CHECKING:
    from aiohttp import web

PROGRAMS = ("lm_eval", "lm-eval")  # names of the program of the harness
OPTIONS_SET_BY_MRL = ("--model", "-m", "--model_args", "-a", "--output_path", "-o")
TASK_OPTIONS = ("--tasks", "-t", "--config", "-C")  # options that name tasks; at least one must be given
INSTALL = "python -m venv ~/lm_eval && ~/lm_eval/bin/pip install 'lm_eval[api]' transformers"
"""Commands that install the harness, for an error message."""
MAX_BODY_BYTES = 256 * 1024**2  # largest request of the harness
END_TIMEOUT_S = 10.0  # how long the harness may take to end after SIGTERM


class HarnessError(RuntimeError):
    """The harness failed, or it wrote no results."""


@dataclass(frozen=True)
class HarnessResult:
    """One metric of one task, or of one group of tasks."""

    task: str
    metric: str  # name of the metric and name of the response filter, such as "exact_match,strict-match"
    samples: int | None  # number of rows of the task; None for a group of tasks
    value: IntervalEstimate


@dataclass(frozen=True)
class HarnessPlan:
    """A checked run of the harness."""

    config: Config
    model: SampledModel  # model that the engines serve: a Hugging Face folder or a Megatron checkpoint
    words: list[str]  # words of the command line in evaluate.harness
    folder: Path  # folder for the files of the harness

    @property
    def server_args(self) -> dict[str, Any]:
        """Arguments of SGLang for every engine. The engines have a tokenizer, which OpenAI's API needs."""
        config = self.config
        arguments = default_server_args(config.model.dtype, self.model.context, device=config.sglang.get("device"))
        del arguments["custom_weight_loader"]  # the weights never change
        arguments |= {DETERMINISTIC: config.generate.deterministic, "skip_tokenizer_init": False}
        return arguments | config.sglang

    def command_line(self, url: str) -> list[str]:
        """Return the command line of the harness with the options that mrl sets. `url`: the endpoint, http://HOST:PORT/v1."""
        rollout, in_flight = self.config.rollout, self.config.generate.requests_in_flight
        arguments = {
            "model": Path(self.config.model.path).name,
            "base_url": f"{url}/completions",
            "tokenizer": self.model.folder.resolve(),
            "tokenizer_backend": "huggingface",
            "max_length": self.model.context,  # longest sequence in tokens
            "num_concurrent": in_flight * (len(rollout.engine_urls) or rollout.num_engines),
            "timeout": int(rollout.request_timeout_s),
        }
        model_args = ",".join(f"{name}={value}" for name, value in arguments.items())
        options = ["--model", "local-completions", "--model_args", model_args, "--output_path", str(self.folder)]
        return [*self.words, *options, *([] if "--log_samples" in self.words else ["--log_samples"])]


def plan_harness(config: Config) -> HarnessPlan:
    """Check evaluate.harness and the model. Starts no process. Raises ValueError for a mistake in the config."""
    assert config.evaluate.harness, "the caller checks it"
    words = _checked_words(config.evaluate.harness)
    for name in ("input", "compare"):
        if vars(config.evaluate)[name]:
            raise ValueError(
                f"evaluate.{name} with evaluate.harness: the harness samples and scores by itself; remove one of the keys."
            )
    check_server_args(config.sglang)
    model = find_model(config)
    if not config.rollout.engine_urls:
        check_engine_device(config, family_of(model.hf))
        check_engine_dtype(config, model.hf, config.model.dtype, config.generate.deterministic, "generate")
    if any(sign in f"{model.folder.resolve()}{Path(config.model.path).name}" for sign in ",="):
        raise ValueError(
            f"model.path={config.model.path}: evaluate.harness cannot pass a path with , or = to lm_eval; rename it."
        )
    return HarnessPlan(config, model, words, Path(config.evaluate.output or config.run.dir).resolve() / "harness")


def _checked_words(line: str) -> list[str]:
    """Return the words of evaluate.harness. A ~ at the beginning of the first word is expanded.

    Raises ValueError if the line has a quote that is not closed, does not run lm_eval, has an option that mrl sets, or names no
    tasks. Also raises ValueError if the first word is not an installed program, or is a Python interpreter that does not find
    lm_eval.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"evaluate.harness={line!r}: {error}; quote it as in a shell.") from None
    at = next((index for index, word in enumerate(words[:3]) if Path(word).name in PROGRAMS), None)
    if at is None:
        raise ValueError(
            f"evaluate.harness={line!r}: expected the command line of lm_eval, such as 'lm_eval --tasks gsm8k' or "
            "'~/lm_eval/bin/lm_eval --tasks gsm8k'."
        )
    words[0] = os.path.expanduser(words[0])
    reason = "" if shutil.which(words[0]) else f"{words[0]} is not installed here"
    if not reason and Path(words[0]).name.startswith("python") and words[1:at] == ["-m"]:
        reason = _why_no_module(words[0], words[at])
    if reason:
        raise ValueError(
            f"evaluate.harness: {reason}. mrl does not install lm_eval. Install it in an environment of its "
            f"own ({INSTALL}), and write \"evaluate.harness='~/lm_eval/bin/lm_eval --tasks ...'\"."
        )
    options = [word.partition("=")[0] for word in words[at + 1 :]]
    if own := [option for option in options if option in OPTIONS_SET_BY_MRL]:
        raise ValueError(f"evaluate.harness: mrl sets the option {own[0]}; remove it.")
    if not set(options) & set(TASK_OPTIONS):
        raise ValueError(f"evaluate.harness={line!r}: names no tasks; add --tasks, such as --tasks gsm8k.")
    return words


def _why_no_module(python: str, module: str) -> str:
    """Return why `python -m module` cannot run, or "" if it can run or if Python does not answer in time.

    A folder without __init__.py in the current directory is not taken for the module.
    """
    code = f"import importlib.util, sys; found = importlib.util.find_spec({module!r}); sys.exit(not (found and found.origin))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return ""
    except OSError as error:
        return f"{python} cannot be run: {error}"
    return f"{python} has no module {module}" if done.returncode else ""


def run_harness(
    plan: HarnessPlan, converting: AbstractContextManager[ByteProgress]
) -> tuple[Path, list[HarnessResult]]:
    """Run the harness. Returns the results file, and the results with intervals at the level evaluate.confidence.

    `converting`: context that shows the progress of the conversion of a Megatron checkpoint. Raises EngineError if no engine is
    left, and HarnessError if the harness fails.
    """
    config, before = plan.config, set(plan.folder.rglob("results_*.json"))
    # In plan.folder, lm_eval creates a folder with the model's name. So the converted model is beside plan.folder, not in it.
    scratch = plan.folder.with_name(f"harness_{CONVERTED_FOLDER_NAME}")
    # an interrupted evaluation may have left the weights of another checkpoint
    shutil.rmtree(scratch, ignore_errors=True)
    folder = plan.model.prepare_engine_folder(scratch, converting)
    group = engine_group(config, plan.server_args, folder)
    with (
        running_engines(config, group) as watcher,
        OpenAIEndpoint(watcher, config.generate.requests_in_flight) as endpoint,
    ):
        status = _run(plan.command_line(endpoint.url))
        if watcher.lost:  # not empty if no engine is left; it then says why
            raise EngineError(watcher.lost)
    shutil.rmtree(scratch, ignore_errors=True)
    if status:
        raise HarnessError(f"{plan.words[0]} ended with status {status}; its messages are above.")
    new = sorted(set(plan.folder.rglob("results_*.json")) - before, key=lambda path: path.stat().st_mtime)
    if not new:
        raise HarnessError(f"{plan.words[0]} wrote no results_*.json in {plan.folder}.")
    return new[-1], read_results(json.loads(new[-1].read_text()), config.evaluate.confidence)


def _run(command: Sequence[str]) -> int:
    """Run the harness with the engine key as API key, and return its exit status. End the harness if an exception occurs."""
    process = subprocess.Popen(command, env=os.environ | {"OPENAI_API_KEY": engine_key()})
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def read_results(content: Mapping[str, Any], confidence: float) -> list[HarnessResult]:
    """Return the metrics in a results file of lm_eval.

    The intervals assume a normal distribution with the standard errors in the file.
    """
    from scipy.stats import norm  # the import takes a second

    z, samples = float(norm.ppf((1 + confidence) / 2)), content.get("n-samples", {})
    found = []
    for task, metrics in content["results"].items():
        for name, value in metrics.items():
            metric, comma, response_filter = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{response_filter}")
            bounds = (value - z * error, value + z * error) if isinstance(error, int | float) else (None, None)
            count = samples.get(task, {}).get("effective")
            found.append(HarnessResult(task, name, count, IntervalEstimate(float(value), *bounds)))
    return found


class OpenAIEndpoint:
    """HTTP server with OpenAI's API that forwards each request to one of the engines.

    The object is a context manager: the server runs until the context exits, in the event loop of the EnginePool of `watcher`.
    Clients must send the engine key (environment variable MRL_ENGINE_KEY) as API key. The engines need a tokenizer. If an engine
    fails, another engine gets its requests.
    """

    def __init__(self, watcher: EngineWatcher, limit: int) -> None:
        """`limit`: with n engines, at most n x `limit` requests are sent to the engines at the same time."""
        self.url = ""  # http://HOST:PORT/v1, set when the server has started
        self._watcher, self._limit = watcher, limit
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._watcher.pool.submit(self._start()).result()
        return self

    def __exit__(self, *error: object) -> None:
        if self._runner is not None:
            self._watcher.pool.submit(self._runner.cleanup()).result()

    async def _start(self) -> None:
        from aiohttp import web  # the import takes half a second

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _forward(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), authorization()["authorization"].encode()):
            return web.json_response(_error("the API key is not the engine key (MRL_ENGINE_KEY)"), status=401)
        path, body = request.path, await request.read()
        try:
            status, content, kind = await self._watcher.call(lambda: self._post(path, body), self._limit)
        except EngineError as error:
            return web.json_response(_error(str(error)), status=502)
        return web.Response(status=status, body=content, content_type=kind)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        timeout_s = self._watcher.pool.spec.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._watcher.pool.forward(path, body)
        except TimeoutError:
            raise deadline_error(timeout_s) from None


def _error(message: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message}}
