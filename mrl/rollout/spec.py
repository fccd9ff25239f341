"""RolloutSpec: all settings of a rollout worker."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.config.process_schema import FaultToleranceConfig
from mrl.config.schema import ScoringConfig
from mrl.core.types import DeviceSlot
from mrl.data.offline import OfflineRows
from mrl.data.prompts import PromptDataset
from mrl.data.tokenizer import ChatTemplate
from mrl.rewards.reward_types import Reward
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.client import SamplingParams
from mrl.rollout.response_metrics import HeldOutEvaluation, RolloutFilter
from mrl.rollout.staleness_buffer import num_extra_groups


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """The SGLang servers of one model: the engines of a run, or the servers of a model of the key `roles`."""

    name: str  # log files and hang reports name a server <name>_<serial number>
    run_dir: str
    arguments: Mapping[str, Any]  # fields of SGLang's ServerArgs, without model_path and tp_size
    model_path: str  # Hugging Face folder
    count: int  # number of servers
    tp_size: int  # tensor-parallel size of each server
    seed: int  # a server gets `seed` + its serial number, unless `arguments` has a random_seed
    max_replacements: int  # how often a server that ends before it is ready is replaced, see EngineServers.wait_ready
    external_urls: tuple[str, ...] = ()  # servers that are running already; if there are any, no server is started
    timeline: bool = False  # whether the servers record spans (parallel.spans)
    # `slots(i)` returns the device slots of server i. None: servers are children of the process that starts them.
    slots: Callable[[int], Sequence[DeviceSlot]] | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of the servers


class PoolSettings(Protocol):
    """Interface of the settings of an engine pool. RolloutSpec and EngineSettings implement it."""

    @property
    def engine_group(self) -> ServerGroup:
        """The engines, as a group of servers."""
        ...

    @property
    def fault_tolerance(self) -> FaultToleranceConfig:
        """How often a failed request is repeated, and how long an engine may compute nothing before it counts as failed."""
        ...

    @property
    def request_timeout_s(self) -> float:
        """How long a batch of requests may take."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether external servers must use the seeds of requests."""
        ...

    @property
    def has_stop_texts(self) -> bool:
        """Whether requests have stop texts. External servers must then have a tokenizer."""
        ...

    @property
    def logprobs(self) -> bool:
        """Whether the engines return log-probabilities of the sampled tokens."""
        ...

    @property
    def routed_experts(self) -> bool:
        """Whether the engines return the experts of each token."""
        ...

    @property
    def uses_adapters(self) -> bool:
        """Whether an engine gets requests only after a push has loaded LoRA adapters into it."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine pool without a rollout worker, for `mrl generate` and `mrl evaluate`."""

    engine_group: ServerGroup
    fault_tolerance: FaultToleranceConfig
    request_timeout_s: float
    deterministic: bool = False
    has_stop_texts: bool = False
    logprobs: bool = True
    routed_experts: bool = False
    uses_adapters: bool = False


@dataclass(frozen=True)
class RolloutSpec:
    """The engines, the prompts, the reward and the sampling settings of one rollout worker."""

    model_path: str  # Hugging Face folder: architecture, tokenizer, and the model weights that engines start with
    run_dir: str  # run directory, to which logs and recorded steps are written
    train: PromptDataset  # training prompts
    test: PromptDataset | None  # held-out prompts, on which the run evaluates the policy but never trains
    reward: Reward  # scores the responses
    advantage_pipeline: AdvantagePipeline  # computes the advantages from the rewards
    rollout_filter: RolloutFilter | None  # decides on which groups steps train; None: on all groups
    needs_greedy: bool  # whether the advantage needs a greedy response to each prompt, in addition to the sampled ones
    rollout_logprobs_as_old: bool  # whether the rollout log-probabilities are used as old log-probabilities
    prompts_per_step: int  # N, the number of groups on which a step trains
    responses_per_prompt: int  # G, the size of a group; with rollout.group_sizes, the mean size
    sampling: SamplingParams  # how training responses are sampled
    num_engines: int
    engine_urls: tuple[str, ...]  # URLs of external servers; if there are any, mrl starts no engine
    engine_tp: int  # tensor-parallel size of an engine
    seed: int  # seed of the run; the seeds of engines and responses are derived from this seed
    evaluations: tuple[HeldOutEvaluation, ...]  # how an evaluation samples and scores the held-out prompts
    request_timeout_s: float  # how long a step or an evaluation waits for its responses before it fails
    record: bool  # whether the tokens of each step are written to run_dir/rollouts
    replay: str | None  # folder of recorded steps that are read; None: the engines sample
    timeline: bool = False  # whether the rollout worker and its engines record spans (parallel.spans)
    samples_per_step: int = 0  # number of responses of each step that run_dir/samples.jsonl keeps as text
    staleness: int = 0  # maximal number of weight versions between sampling a token and training on it
    over_sample_rate: float = 0.0  # extra groups in flight, as a fraction of `prompts_per_step`
    in_order: bool = False  # whether steps take groups in the order in which their prompts were drawn
    max_sampling_rounds: int = 1  # a step replaces at most (max_sampling_rounds - 1) * prompts_per_step rejected groups
    log_key: str = "samples"  # subfolder of run_dir/rollout_log: a hash of what determines the samples (see RolloutLog)
    chat: ChatTemplate = field(default_factory=ChatTemplate)  # how messages become text
    scoring: ScoringConfig = field(default_factory=ScoringConfig)  # processes and deadline of the reward
    agent: ToolAgent | None = None  # samples multi-turn responses with tools; None: responses have a single turn
    deterministic: bool = False  # whether each response gets its own seed
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)  # retries and engine timeouts
    max_group_size: int | None = None  # largest size of a group; None: all groups have the size `responses_per_prompt`
    offline: OfflineRows | None = None  # responses from a file, on which steps also train; None: there are none
    logprobs: bool = True  # whether engines return log-probabilities, which training needs
    routed_experts: bool = False  # whether engines return the experts of each token (mixture of experts only)
    server_args: dict[str, Any] = field(default_factory=dict)  # fields of SGLang's ServerArgs
    engine_env: Mapping[str, str] = field(default_factory=dict)  # environment variables of the engines
    # `slots(i)` returns the device slots of engine i. None: engines are child processes of the rollout worker.
    slots: Callable[[int], Sequence[DeviceSlot]] | None = None
    served: tuple[ServerGroup, ...] = ()  # servers of each reward model, judge or teacher that mrl serves (key `roles`)

    @property
    def engine_group(self) -> ServerGroup:
        """The engines, as a group of servers."""
        routing = {"enable_return_routed_experts": True} if self.routed_experts else {}
        return ServerGroup(
            name="engine",
            run_dir=self.run_dir,
            arguments=self.server_args | routing,
            model_path=self.model_path,
            count=self.num_engines,
            tp_size=self.engine_tp,
            seed=self.seed,
            max_replacements=self.fault_tolerance.max_response_attempts,
            external_urls=self.engine_urls,
            timeline=self.timeline,
            slots=self.slots,
            env=self.engine_env,
        )

    @property
    def uses_adapters(self) -> bool:
        """Whether an engine gets requests only after a push has loaded LoRA adapters into it."""
        return bool(self.server_args.get("enable_lora"))

    @property
    def has_stop_texts(self) -> bool:
        """Whether stop texts may end the responses of steps or of evaluations."""
        return any(each.stop for each in (self.sampling, *(evaluation.sampling for evaluation in self.evaluations)))

    @property
    def largest_group(self) -> int:
        """Largest number of responses to a prompt."""
        return self.max_group_size or self.responses_per_prompt

    @property
    def extra_groups(self) -> int:
        """Number of groups that over-sampling adds to the groups in flight."""
        return num_extra_groups(self.over_sample_rate, self.prompts_per_step)

    @property
    def buffer_capacity(self) -> int:
        """Number of groups for which the staleness buffer has room."""
        return (self.staleness + 1) * self.prompts_per_step + self.extra_groups
