"""`mrl plan search`: finds the layout, placement and division of GPUs with the shortest predicted step, and explains them."""

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms.parts import POLICY_COLUMNS
from mrl.config import hydra_entry
from mrl.config.process_schema import Transport
from mrl.config.schema import Config
from mrl.config.validate import token_budgets
from mrl.controller.plan_models import chat_template, needed_roles
from mrl.controller.plan_train import algorithm_of
from mrl.data.images import ImagePrompts
from mrl.data.prompts import mean_prompt_tokens
from mrl.data.sources import train_sources
from mrl.planner.engine_memory import DEFAULT_MEM_FRACTION
from mrl.planner.layout_search import (
    LayoutSearch,
    RunCandidate,
    SearchResult,
    describe_difference,
    explain_limits,
    memory_check,
)
from mrl.planner.layout_space import GpuCluster, LayoutSpace
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import kv_itemsize, model_shape, trainer_settings
from mrl.planner.run_trace import read_lengths, read_run
from mrl.planner.step_workload import LengthDistribution, StepWorkload
from mrl.planner.trainer_time import WEIGHT_BYTES

USAGE = """usage: mrl plan search model.path=FOLDER cluster=h100 cluster.nodes=N [KEY=VALUE ...] [--json]

Searches for the setting with the shortest predicted step and explains it (docs/how_to/out_of_memory.md). The search covers all
parallel layouts of the trainers, all divisions of the GPUs between trainers and engines, the placement disaggregated with all
rollout modes, and the placement colocated with the mode sync. Reads config.json of the model, and prompts of data.train if they
exist. Starts no process.

  mrl plan search model.path=Qwen3-30B-A3B cluster=h100 cluster.nodes=4
  mrl plan search model.path=Qwen3-30B-A3B cluster=h100 cluster.nodes=4 plan.fix=[rollout.mode] rollout.mode=sync

  cluster, cluster.hardware.*   hardware of the nodes (a100, h100, h200, b200)
  cluster.nodes                 number of nodes
  plan.fix                      keys or sections that the search does not change, such as [parallel.tp,rollout,placement]
  plan.lengths                  source of response lengths: a run directory, or a jsonl file with a list of lengths in each line.
                                Without it, lengths have a log-normal distribution up to rollout.max_response_tokens.
  plan.response_tokens          median of the log-normal distribution
  plan.response_sigma           sigma of the log-normal distribution
  plan.prompt_tokens            length of a typical prompt. Default: the mean of data.train if its files and the tokenizer exist,
                                otherwise data.max_prompt_tokens, otherwise 512. Not used if plan.lengths is a run directory.
  plan.top                      number of results that are shown. Default: 5.
  plan.efficiency               attained fractions of the peak speeds that the vendor states
  plan.latency_us               latency of one collective operation (microseconds)
  --json                        prints the result as JSON
"""

FIXABLE = {
    **{f"parallel.{name}": name for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")},
    "rollout.engine_tp": "engine_tp",
    "rollout.num_engines": "num_engines",
    "rollout.mode": "mode",
    "placement": "placement",
}
"""Config keys that plan.fix may name -> their names in LayoutSpace.fixed."""
TRANSPORT_PLACEMENTS = {Transport.cuda_ipc: "colocated", Transport.process_group: "disaggregated"}
"""Transport between GPUs -> the only placement of the search with which the transport works."""
DEFAULT_PROMPT_TOKENS = 512  # used if the config has neither prompts nor a length of prompts
MEASURED_ROWS = 256  # the mean prompt length is measured on at most this number of rows of each file of data.train


def fixed_values(config: Config) -> dict[str, Any]:
    """Return LayoutSpace.fixed (name -> value) for all keys that plan.fix names.

    Keys whose value is null in the config are left out. Raises ValueError for a key that the search does not set.
    """
    fixed: dict[str, Any] = {}
    for key in config.plan.fix:
        names = [name for name in FIXABLE if name == key or name.startswith(f"{key}.")]
        if not names:
            raise ValueError(
                f"plan.fix: the search does not set {key!r}; it sets {', '.join(FIXABLE)}, and you can name their sections."
            )
        for name in names:
            fixed[FIXABLE[name]] = _configured_value(config, name)
    return {name: value for name, value in fixed.items() if value is not None}


def required_placement(config: Config, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placement that weight_sync.transport requires, as an entry of LayoutSpace.fixed; {} if it requires none.

    Raises ValueError if the transport does not work on GPUs, or if it does not work with the placement in `fixed`.
    """
    transport = Transport(config.weight_sync.transport)
    if transport is Transport.shared_memory:
        raise ValueError(
            "weight_sync.transport=shared_memory: works only on CPUs, and the search is for GPUs; use auto."
        )
    placement = TRANSPORT_PLACEMENTS.get(transport)
    if placement and fixed.get("placement", placement) != placement:
        raise ValueError(
            f"weight_sync.transport={transport}: needs placement={placement}, and plan.fix requires "
            f"placement={fixed['placement']}; use auto, or leave placement out of plan.fix."
        )
    return dict(placement=placement) if placement else {}


def _configured_value(config: Config, key: str) -> Any:
    if key == "placement":
        roles = [set(pool["roles"] if isinstance(pool, dict) else pool) for pool in config.placement.pools.values()]
        return "colocated" if any({"actor", "engines"} <= pool_roles for pool_roles in roles) else "disaggregated"
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    return config.parallel.tp if key == "parallel.etp" and value is None else value


def prompt_length(config: Config) -> tuple[int, str]:
    """Return the number of tokens of a typical prompt, and a text that says where the number comes from.

    Raises ValueError if the training data or the tokenizer cannot be read.
    """
    plan, data = config.plan, config.data
    if plan.lengths and Path(plan.lengths).is_dir():
        return round(float(read_run(Path(plan.lengths)).groups.prompts.mean())), "mean of the run in plan.lengths"
    if plan.prompt_tokens:
        return plan.prompt_tokens, "plan.prompt_tokens"
    if all(Path(file).exists() for file in [*data.train, Path(config.model.path) / "tokenizer.json"]) and data.train:
        hf = HFConfig.load(config.model.path, config.model.family, config.model.train_mtp)
        images = ImagePrompts.of(config.model.path, family_of(hf).read(hf).vision)
        sources, chat = train_sources(data), chat_template(config)
        mean = mean_prompt_tokens(sources, config.model.path, chat, MEASURED_ROWS, images)
        return mean, f"mean of the first {MEASURED_ROWS} rows of each file of data.train"
    if data.max_prompt_tokens:
        return data.max_prompt_tokens, "data.max_prompt_tokens"
    return DEFAULT_PROMPT_TOKENS, "assumed; plan.prompt_tokens sets it"


def length_distribution(config: Config) -> LengthDistribution:
    """Return the distribution of the lengths in plan.lengths; without this key, return a log-normal distribution.

    Raises ValueError if plan.lengths cannot be read.
    """
    plan, longest = config.plan, config.rollout.max_response_tokens
    prompt, _ = prompt_length(config)
    if plan.lengths is None:
        median = plan.response_tokens or longest / 4
        return LengthDistribution.log_normal(prompt, median, plan.response_sigma, longest)
    path = Path(plan.lengths)
    groups = read_run(path).groups if path.is_dir() else read_lengths(path, prompt)
    return LengthDistribution.of(groups.prompts, groups.responses)


def step_workload(config: Config) -> StepWorkload:
    """Return the work of one step of the run. Raises ValueError for a mistake in the config."""
    required_inputs = algorithm_of(config).required_inputs
    actor, critic = token_budgets(config, "actor"), token_budgets(config, "critic")
    return StepWorkload(
        length_distribution(config),
        prompts=config.rollout.prompts_per_step,
        responses_per_prompt=config.rollout.responses_per_prompt,
        max_tokens=actor.train,
        forward_max_tokens=actor.forward,
        share_prompts=config.trainer.share_prompts,
        mini_batches=config.algorithm.mini_batches,
        epochs=config.algorithm.epochs,
        # additional forward passes for log-probabilities: one of the actor and one of the reference, each only if it is needed
        scoring_passes=bool(required_inputs & POLICY_COLUMNS.keys()) + ("ref_logprobs" in required_inputs),
        critic="values" in required_inputs,
        critic_budgets=(critic.train, critic.forward),
    )


def make_search(config: Config) -> LayoutSearch:
    """Build the search for a config.

    Raises ValueError for a mistake in the config. Also raises ValueError if the run has models of the key `roles`, because the
    search would not count the GPUs, memory and seconds of these models.
    """
    if roles := needed_roles(config, algorithm_of(config).required_inputs):
        raise ValueError(
            f"roles.{next(iter(roles))}: mrl plan search plans for actor, critic and engines, and would ignore the GPUs, memory "
            "and time of the models in `roles`; compare settings of this run with mrl plan memory."
        )
    hf = HFConfig.load(config.model.path, config.model.family, config.model.train_mtp)
    family = family_of(hf)
    arch = family.read(hf)
    shape = model_shape(config, hf, arch)
    cluster, work, fixed = GpuCluster.of(config.cluster, config.plan), step_workload(config), fixed_values(config)
    fixed |= required_placement(config, fixed)
    if arch.window and not arch.has_sinks and not config.trainer.share_prompts:  # mrl train refuses cp > 1 then
        fixed = dict(cp=1) | fixed
    options: dict[str, Any] = dict(modes=(fixed["mode"],)) if "mode" in fixed else {}
    adapters = ModelShape.of_adapters(family, arch, config.lora) if config.lora.rank else None
    trained = [trainer_settings(config, arch.max_position_embeddings, adapters=adapters)]
    if work.critic:
        trained.append(trainer_settings(config, arch.max_position_embeddings, "critic", head="value"))
    if config.rollout.max_staleness is not None:
        options["staleness"] = config.rollout.max_staleness
    return LayoutSearch(
        LayoutSpace(arch, shape, cluster, work.lengths.longest, fixed),
        work,
        memory_check(shape, cluster, *trained),
        bucket_bytes=config.weight_sync.bucket_bytes,
        memory_fraction=config.sglang.get("mem_fraction_static") or DEFAULT_MEM_FRACTION,
        max_requests=config.sglang.get("max_running_requests"),
        kv_itemsize=kv_itemsize(config, WEIGHT_BYTES),
        **options,
    )


def overrides(search: LayoutSearch, candidate: RunCandidate) -> list[str]:
    """Return the overrides that give `mrl train` the settings of a candidate."""
    layout, work = candidate.trainers.layout, search.work
    keys = layout.overrides(candidate.trainers.replicas, search.space.shape.num_experts > 0)
    keys |= {"rollout.num_engines": candidate.num_engines, "rollout.engine_tp": candidate.engine_tp}
    if candidate.mode != "sync":
        keys["rollout.mode"] = candidate.mode
    if candidate.mode == "async":
        keys["rollout.max_staleness"] = candidate.rollout.staleness
    words = [f"{key}={value}" for key, value in keys.items()]
    if work.critic and candidate.placement == "disaggregated":
        return [*words, "'placement.pools={train: [actor, critic], serve: [engines]}'"]
    return [*words, f"placement={candidate.placement}"]


def as_json(config: Config, search: LayoutSearch, result: SearchResult) -> dict[str, Any]:
    """Return the result as JSON values. All times are in seconds."""

    def plain(candidate: RunCandidate) -> dict[str, Any]:
        return dict(
            step_s=candidate.step_s,
            parts_s=search.parts(candidate),
            train_s=candidate.trainers.train_s,
            placement=candidate.placement,
            mode=candidate.mode,
            gpus=candidate.gpus,
            trainer_gpus=candidate.trainers.gpus,
            engine_gpus=candidate.engine_gpus,
            overrides=overrides(search, candidate),
        )

    return dict(
        hardware=vars(config.cluster.hardware),
        nodes=config.cluster.nodes,
        gpus_per_node=config.cluster.gpus_per_node,
        assumed=dict(
            efficiency=config.plan.efficiency,
            latency_us=config.plan.latency_us,
            pcie_gb_per_s=config.plan.pcie_gb_per_s,
            prompt_tokens=search.work.lengths.prompt_tokens,
            prompt_tokens_source=prompt_length(config)[1],
        ),
        best=[plain(candidate) for candidate in result.best],
        best_of_each_placement_and_mode=[plain(candidate) for candidate in result.best_of_each_placement_and_mode],
        limits=explain_limits(search, result.best[0]),
        evaluated=result.evaluated,
        excluded=dict(result.excluded),
    )


def show(config: Config, search: LayoutSearch, result: SearchResult) -> None:
    """Print the best candidates, with explanations and with the overrides for the first one."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    cluster, work, best = config.cluster, search.work, result.best[0]
    console.print(
        f"{search.space.shape.num_weights / 1e9:.4g} billion parameters on {cluster.nodes} nodes of "
        f"{cluster.gpus_per_node} {cluster.hardware.name or 'GPUs'}; a step has {work.prompts} prompts x "
        f"{work.responses_per_prompt} responses of {work.lengths.mean:,.0f} tokens on average, "
        f"{work.lengths.longest - work.lengths.prompt_tokens:,.0f} at most, and prompts of {work.lengths.prompt_tokens:,} tokens "
        f"({prompt_length(config)[1]})"
    )
    assumed = ", ".join(f"{name} {value:.0%}" for name, value in config.plan.efficiency.items())
    console.print(
        f"assumed: {assumed} of the vendor's peak speeds; {config.plan.latency_us:g} us latency of each collective"
    )
    title = f"the {len(result.best)} best candidates, from {result.evaluated:,} combinations of layout and replicas"
    console.print(_candidate_table(result.best, title))
    for text in explain_limits(search, best):
        console.print(f"1: {text}")
    for position, candidate in enumerate(result.best[1:], 2):
        console.print(f"{position} compared with 1: {describe_difference(search, best, candidate)}")
    others = [candidate for candidate in result.best_of_each_placement_and_mode if candidate.kind != best.kind]
    if others:
        console.print(_candidate_table(others, "the best candidate of every other placement and mode"))
    excluded = ", ".join(f"{reason}: {count:,}" for reason, count in result.excluded.most_common())
    console.print(f"excluded: {excluded or 'nothing'}\n\narguments of mrl train for candidate 1:")
    sys.stdout.write(f"  {' '.join(overrides(search, best))}\n")


def _candidate_table(candidates: list[RunCandidate], title: str) -> Table:
    table = Table("", "s/step", title=title, title_justify="left")
    for column in ("sampling", "training", "push", "switch", "trainers", "engines", "placement"):
        table.add_column(column, justify="left" if column in ("trainers", "engines", "placement") else "right")
    for position, candidate in enumerate(candidates, 1):
        trainers, mode = candidate.trainers, "" if candidate.placement == "colocated" else f", {candidate.mode}"
        seconds = (
            candidate.step_s,
            candidate.rollout_s,
            trainers.train_s,
            candidate.push_s,
            candidate.offload_and_load_s,
        )
        table.add_row(
            str(position),
            *(f"{value:.4g}" for value in seconds),
            f"{trainers.gpus}: dp{trainers.replicas} {trainers.layout}",
            f"{candidate.engine_gpus}: {candidate.num_engines} x tp{candidate.engine_tp}",
            f"{candidate.placement}{mode}",
        )
    return table


def explain_search(print_json: bool, config: Config) -> None:
    """Run the search and print its result."""
    with hydra_entry.exit_on_user_error():
        search = make_search(config)
        result = search.run(config.plan.top)
    if print_json:
        sys.stdout.write(json.dumps(as_json(config, search, result)) + "\n")
    else:
        show(config, search, result)


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan search`."""
    words = [word for word in argv if word != "--json"]
    job = partial(explain_search, len(words) < len(argv))
    return hydra_entry.run([*words, *hydra_entry.NO_OUTPUT_FILES], job, USAGE, weights=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
