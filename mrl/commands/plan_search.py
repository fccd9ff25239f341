"""`mrl plan search`: the quickest layout, placement and share of GPUs for a model on a cluster, and why."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms.parts import build_algorithm
from mrl.commands import hydra_app
from mrl.config.schema import Config
from mrl.planner.layout_search import Candidate, Found, Search, fits_of, limits, losses
from mrl.planner.layout_space import Machine, Space
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import FRACTION, trainer_settings
from mrl.planner.run_trace import read_lengths, read_run
from mrl.planner.sizes import ModelSizes
from mrl.planner.step_workload import Lengths, Workload

USAGE = """usage: mrl plan search model.path=FOLDER cluster=h100 cluster.nodes=N [KEY=VALUE ...] [--json]

Searches every layout of the trainers, every share of the GPUs, both placements and all modes of rollout for the one whose
steps are predicted to be quickest, and says why (docs/plan_search.md). Needs the model's config.json only. Starts nothing.

  mrl plan search model.path=Qwen3-30B-A3B cluster=h100 cluster.nodes=4
  mrl plan search model.path=Qwen3-30B-A3B cluster=h100 cluster.nodes=4 plan.fix=[rollout.mode] rollout.mode=sync

  cluster, cluster.hardware.*                 the machines: a100, h100, h200, b200; cluster.nodes: how many
  plan.fix                                    keys or sections to leave as they are: [parallel.tp, rollout, placement]
  plan.lengths                                a run's folder, or a jsonl file of lists of tokens: whose responses' lengths
  plan.prompt_tokens, plan.response_tokens    without it: of prompts, and the median of log-normal responses,
  plan.response_sigma                         which are spread so far, and cut at rollout.max_response_tokens
  plan.top                                    answers to show
  plan.*_efficiency, plan.latency_us          what the machines reach of their vendor's numbers
  --json                                      all of it for programs
"""

FIXABLE = {
    **{f"parallel.{name}": name for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")},
    "rollout.engine_tp": "engine_tp",
    "rollout.num_engines": "num_engines",
    "rollout.mode": "mode",
    "placement": "placement",
}
"""What plan.fix may name, and what the search calls it."""
TYPICAL_PROMPT = 512  # tokens, where nothing says how long prompts are
EFFICIENCIES = ("matmul_efficiency", "attention_efficiency", "expert_efficiency", "bandwidth_efficiency")


def fixed_of(config: Config) -> dict[str, Any]:
    """The values that plan.fix leaves as they are; raises ValueError at a key that the search does not set."""
    found: dict[str, Any] = {}
    for key in config.plan.fix:
        names = [name for name in FIXABLE if name == key or name.startswith(f"{key}.")]
        if not names:
            raise ValueError(f"plan.fix: {key!r} is not searched; expected some of {', '.join(FIXABLE)}, or a section.")
        for name in names:
            found[FIXABLE[name]] = _configured(config, name)
    return {name: value for name, value in found.items() if value is not None}


def _configured(config: Config, key: str) -> Any:
    if key == "placement":
        roles = [set(pool["roles"] if isinstance(pool, dict) else pool) for pool in config.placement.pools.values()]
        return "colocated" if any({"actor", "engines"} <= of_pool for of_pool in roles) else "disaggregated"
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return config.parallel.tp if key == "parallel.etp" and value is None else value


def lengths_of(config: Config) -> Lengths:
    """Of plan.lengths, or log-normal. Raises ValueError."""
    plan, longest = config.plan, config.rollout.max_response_tokens
    prompt = plan.prompt_tokens or config.data.max_prompt_tokens or TYPICAL_PROMPT
    if plan.lengths is None:
        return Lengths.log_normal(prompt, plan.response_tokens or longest / 4, plan.response_sigma, longest)
    path = Path(plan.lengths)
    groups = read_run(path).groups if path.is_dir() else read_lengths(path, prompt)
    return Lengths.of(groups.prompts, groups.responses)


def workload_of(config: Config) -> Workload:
    """A step of the run that this config describes. Raises ValueError."""
    needs = build_algorithm(config).needs
    return Workload(
        lengths_of(config),
        prompts=config.rollout.prompts_per_step,
        responses_per_prompt=config.rollout.responses_per_prompt,
        max_tokens=config.trainer.max_tokens_per_micro_batch,
        share_prompts=config.trainer.share_prompts,
        mini_batches=config.algorithm.mini_batches,
        epochs=config.algorithm.epochs,
        scoring_passes=len(needs & {"old_logprobs", "ref_logprobs"}),
        critic="values" in needs,
    )


def search_of(config: Config) -> Search:
    """The search that this config asks for; raises ValueError."""
    hf = HFConfig.load(config.model.path, config.model.family)
    family = family_of(hf)
    arch = family.read(hf)
    machine, work, fixed = Machine.of(config.cluster, config.plan), workload_of(config), fixed_of(config)
    sizes = ModelSizes.of(family, arch)
    options: dict[str, Any] = dict(modes=(fixed["mode"],)) if "mode" in fixed else {}
    if config.rollout.max_staleness is not None:
        options["staleness"] = config.rollout.max_staleness
    return Search(
        Space(arch, sizes, machine, work.lengths.longest, fixed),
        work,
        fits_of(ModelShape.of(family, arch), machine, trainer_settings(config, arch.max_position_embeddings)),
        bucket_bytes=config.weight_sync.bucket_bytes,
        memory_fraction=config.sglang.get("mem_fraction_static") or FRACTION,
        most_running=config.sglang.get("max_running_requests"),
        **options,
    )


def overrides(search: Search, answer: Candidate) -> list[str]:
    """What to add to `mrl train` for an answer."""
    layout, work = answer.trainers.layout, search.work
    keys = layout.overrides(answer.trainers.replicas, search.space.sizes.experts > 0)
    keys |= {"rollout.num_engines": answer.num_engines, "rollout.engine_tp": answer.engine_tp}
    if answer.mode != "sync":
        keys["rollout.mode"] = answer.mode
    words = [f"{key}={value}" for key, value in keys.items()]
    if work.critic and answer.placement == "disaggregated":
        return [*words, "'placement.pools={train: [actor, critic], serve: [engines]}'"]
    return [*words, f"placement={answer.placement}"]


def as_json(config: Config, search: Search, found: Found) -> dict[str, Any]:
    """All that is known, in plain types; seconds."""

    def plain(answer: Candidate) -> dict[str, Any]:
        return dict(
            step_s=answer.step_s,
            parts_s=search.parts(answer),
            train_s=answer.trainers.seconds,
            placement=answer.placement,
            mode=answer.mode,
            gpus=answer.gpus,
            trainer_gpus=answer.trainers.gpus,
            engine_gpus=answer.engine_gpus,
            overrides=overrides(search, answer),
        )

    return dict(
        hardware=vars(config.cluster.hardware),
        nodes=config.cluster.nodes,
        gpus_per_node=config.cluster.gpus_per_node,
        assumed={name: getattr(config.plan, name) for name in (*EFFICIENCIES, "latency_us", "pcie_gb_per_s")},
        best=[plain(answer) for answer in found.best],
        best_of_each=[plain(answer) for answer in found.of_each],
        limits=limits(search, found.best[0]),
        looked_at=found.looked_at,
        excluded=dict(found.excluded),
    )


def show(config: Config, search: Search, found: Found) -> None:
    """Tables of the best, what limits the first, what others lose, what was left out, and what to paste."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    cluster, work, best = config.cluster, search.work, found.best[0]
    console.print(
        f"{search.space.sizes.parameters / 1e9:.4g} billion parameters on {cluster.nodes} nodes of "
        f"{cluster.gpus_per_node} {cluster.hardware.name or 'GPUs'}; a step: {work.prompts} prompts x "
        f"{work.responses_per_prompt} responses of {work.lengths.mean:,.0f} tokens in the mean, "
        f"{work.lengths.longest - work.lengths.prompt_tokens:,.0f} at most"
    )
    assumed = ", ".join(f"{name.removesuffix('_efficiency')} {getattr(config.plan, name):.0%}" for name in EFFICIENCIES)
    console.print(f"assumed, not measured: {assumed} of the vendor's numbers; a message {config.plan.latency_us:g} us")
    console.print(
        _table(found.best, f"the best {len(found.best)} of {found.looked_at:,} layouts and sizes of trainers")
    )
    for text in limits(search, best):
        console.print(f"1: {text}")
    for number, answer in enumerate(found.best[1:], 2):
        console.print(f"{number} against 1: {losses(search, best, answer)}")
    others = [answer for answer in found.of_each if answer.shape != best.shape]
    if others:
        console.print(_table(others, "the best of each other placement and mode"))
    left_out = ", ".join(f"{reason}: {number:,}" for reason, number in found.excluded.most_common())
    console.print(f"left out: {left_out or 'nothing'}\n\nto train as 1:")
    sys.stdout.write(f"  {' '.join(overrides(search, best))}\n")


def _table(answers: list[Candidate], title: str) -> Table:
    table = Table("", "s/step", title=title, title_justify="left")
    for column in ("sampling", "training", "weights", "switches", "trainers", "engines", "placement"):
        table.add_column(column, justify="left" if column in ("trainers", "engines", "placement") else "right")
    for number, answer in enumerate(answers, 1):
        trainers, mode = answer.trainers, "" if answer.placement == "colocated" else f", {answer.mode}"
        seconds = (answer.step_s, answer.rollout_s, trainers.seconds, answer.push_s, answer.switch_s)
        table.add_row(
            str(number),
            *(f"{value:.4g}" for value in seconds),
            f"{trainers.gpus}: dp{trainers.replicas} {trainers.layout}",
            f"{answer.engine_gpus}: {answer.num_engines} x tp{answer.engine_tp}",
            f"{answer.placement}{mode}",
        )
    return table


def explain(as_program: bool, config: Config) -> None:
    """Search, and print what was found."""
    with hydra_app.as_user_error():
        search = search_of(config)
        found = search.run(config.plan.top)
    if as_program:
        sys.stdout.write(json.dumps(as_json(config, search, found)) + "\n")
    else:
        show(config, search, found)


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan search`."""
    words = [word for word in argv if word != "--json"]
    return hydra_app.run([*words, *hydra_app.NO_OUTPUT], partial(explain, len(words) < len(argv)), USAGE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
