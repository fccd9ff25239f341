"""If the user makes a mistake, a command ends before it starts anything. A few lines say what to do. The exit status is 2."""

import shutil
import uuid

import pyarrow.parquet as pq
import pytest
from forked_commands import forked_commands
from mrl_runs import tagged, wait_until

from mrl.core.run_errors import MAX_LINES

SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
FILES = {
    "raises.py": f"{SCORE}    return extra_info['answer'] == 1\n",
    "none.py": f"{SCORE}    extra_info.get(solution_str)\n",
    "keys.py": f"{SCORE}    return {{'reward': 1.0}}\n",
    "good.py": f"{SCORE}    return 1.0\n",
    "syntax.py": "def compute_score(data_source solution_str):\n    return 1.0\n",
    "imports.py": "import pandass\n",
    "signature.py": "def compute_score(response, answer):\n    return 1.0\n",
    "my_parts.py": (
        "from mrl.rollout.agents.tools import MarkerParser\n\n\nclass Parser(MarkerParser):\n    def __call__(self, text):\n"
        "        return self.table[text]\n\n\ndef rows():\n    return open('/nowhere/rows')\n"
    ),
    "rows.csv": "prompt,ground_truth\n1+1=,2\n",
    "broken.jsonl": '{"prompt": "1+1="\n',
    "empty.jsonl": "",
    "template.jinja": "{% for m in messages %}{{ m.content }\n",
}


@pytest.fixture(scope="module")
def bad_files(inputs, tmp_path_factory):
    """Files and folders with mistakes, and the calculator's input files."""
    from mrl.config.hydra_entry import compose_config
    from mrl.controller.plan_models import make_input_files

    folder = tmp_path_factory.mktemp("bad")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    table = pq.read_table(inputs / "train.parquet").slice(0, 5)
    pq.write_table(table.drop_columns(["reward_model"]), folder / "column.parquet")
    rows = table.to_pylist()
    rows[3]["prompt"][0]["content"] = "1" * 70
    pq.write_table(table.from_pylist(rows), folder / "long.parquet")
    for name in ("no_weights", "damaged"):
        (folder / name).mkdir()
        shutil.copy(inputs / "model/config.json", folder / name)
    (folder / "damaged/config.json").write_text('{"architectures": ')
    make_input_files(compose_config(["experiment=calculator", f"data.inputs.folder={folder}/calculator"]))
    return folder


FUNCTION, JUDGE = "reward=function", ["reward=judge", "reward.url=http://127.0.0.1:1", "reward.model=m"]
AGENT = "rollout.agent._target_"
MISTAKES = {
    # Keys and values.
    "an unknown key": (["algorithm.lr_typo=1"], "unknown key 'algorithm.lr_typo'; did you mean 'optim.lr'?"),
    "an argument with dashes": (
        ["--trainer.max_steps=3"],
        "keys are written without dashes, as KEY=VALUE; write trainer.max_steps=3",
    ),
    "a key without a value": (["optim.lr"], "'optim.lr' has no value; write KEY=VALUE"),
    "a misspelled experiment": (["experiment=quickstrat"], "Could not find 'experiment/quickstrat' Available options"),
    "a misspelled reward": (
        ["reward=exact_mach"],
        "Available options in 'reward': by_source code exact_match function",
    ),
    "a misspelled algorithm": (["algorithm=gpro"], "Available options in 'algorithm': cispo"),
    "a text for a number": (["optim.lr=fast"], "optim.lr: Value 'fast' of type 'str' could not be converted to Float"),
    "a fraction for a count": (["trainer.max_steps=2.5"], "trainer.max_steps: Value '2.5' of type 'float'"),
    "a number that is too small": (
        ["rollout.responses_per_prompt=0"],
        "rollout.responses_per_prompt=0: must be 1 or more",
    ),
    "an unknown choice": (["rollout.mode=asynch"], "expected sync, one_step_off or async; did you mean async?"),
    "an argument of vLLM": (["sglang.gpu_memory_utilization=0.5"], "is not an argument of this SGLang"),
    "an unknown SGLang argument": (["sglang.mem_fraction=0.5"], "did you mean sglang.mem_fraction_static?"),
    "a misspelled argument of a part": (["algorithm.advantage.scale_reward=none"], "did you mean 'scale_rewards'?"),
    "a part that does not exist": (["algorithm.loss._target_=my_parts.Loss"], "my_parts.Loss: cannot be imported"),
    "a loss of the user with other arguments": (
        ["algorithm.loss._target_=my_parts.rows"],
        "algorithm.loss: rows ({run}/my_parts.py:9) takes (), but mrl calls it with (inputs)",
    ),
    "a misspelled aggregation": (["algorithm.aggregation=sequence_means"], "did you mean sequence_mean?"),
    "a learning-rate schedule without an end": (["optim.lr_schedule=cosine"], "lr_decay_steps=0"),
    "nodes without Slurm": (["cluster.nodes=2"], "add cluster=slurm"),
    "a secret in the config": ([*JUDGE, "++reward.api_key=abcdefgh"], "set reward.api_key='${{oc.env:API_KEY}}'"),
    # The reward, the agent and the data set of the user.
    "a reward that raises": (
        [FUNCTION, "reward.path={bad}/raises.py"],
        "KeyError: 'answer' ({bad}/raises.py:2, in compute_score)",
    ),
    "a reward without return": (
        [FUNCTION, "reward.path={bad}/none.py"],
        "expected a finite number, a bool, a dict whose key 'score'",
    ),
    "a reward with another key": (
        [FUNCTION, "reward.path={bad}/keys.py"],
        "without the key 'score', got the keys reward",
    ),
    "a missing reward file": (
        [FUNCTION, "reward.path=/nowhere/my.py"],
        "there is no such file; expected a Python file",
    ),
    "a misspelled reward function": (
        [FUNCTION, "reward.path={bad}/good.py", "reward.name=compute_scores"],
        "did you mean 'compute_score'?",
    ),
    "a reward with a syntax error": (
        [FUNCTION, "reward.path={bad}/syntax.py"],
        "SyntaxError: invalid syntax (syntax.py, line 1)",
    ),
    "a reward that needs a missing module": (
        [FUNCTION, "reward.path={bad}/imports.py"],
        "No module named 'pandass' ({bad}/imports.py:1",
    ),
    "a reward with another signature": (
        [FUNCTION, "reward.path={bad}/signature.py"],
        "cannot be called as compute_score(",
    ),
    "a judge without its key": ([*JUDGE, "++reward.api_key_env=NO_SUCH_KEY"], "this environment variable is not set"),
    "an agent that is no agent": ([f"++{AGENT}=my_parts.Parser"], "my_parts.Parser"),
    "a parser that raises": (
        [
            "experiment=calculator",
            "data.inputs.folder={bad}/calculator",
            "rollout.agent.parser._target_=my_parts.Parser",
        ],
        "no attribute 'table' ({run}/my_parts.py:6, in __call__)",
    ),
    "a data set that raises": (
        ["data.train=[]", "++data.dataset._target_=my_parts.rows"],
        "({run}/my_parts.py:10, in rows)",
    ),
    # Files.
    "a missing model": (
        ["sft.train=null", "model.path=/nowhere/model"],
        "model.path=/nowhere/model: the folder is missing",
    ),
    "a model without weights": (["sft.train=null", "model.path={bad}/no_weights"], "no *.safetensors found; expected"),
    "a damaged model": (["sft.train=null", "model.path={bad}/damaged"], "damaged/config.json: not JSON"),
    "no data": (["data.train=[]"], "data.train must name at least one parquet or jsonl file"),
    "a missing data file": (["data.train=[/nowhere/train.parquet]"], "/nowhere/train.parquet: no such file"),
    "a csv file": (["data.train=[{bad}/rows.csv]"], "'.csv' are not supported; expected a .jsonl or .parquet file"),
    "a broken line": (["data.train=[{bad}/broken.jsonl]"], "row 0: not a JSON object"),
    "an empty data file": (["data.train=[{bad}/empty.jsonl]"], "empty.jsonl: the file has no rows"),
    "a missing column": (
        ["data.train=[{bad}/column.parquet]"],
        "row 0, column 'reward_model': is missing; found data_source, prompt, ability, extra_info",
    ),
    "a long prompt": (
        ["data.train=[{bad}/long.parquet]"],
        "row 3, column 'prompt': 70 tokens are more than the 57 that leave room for the response",
    ),
    "a missing chat template": (
        ["data.chat_template=/nowhere/chat.jinja"],
        "no such file; expected a Jinja chat template",
    ),
    "a damaged chat template": (["data.chat_template={bad}/template.jinja"], "template.jinja: line 1: unexpected '}}'"),
    "missing recorded rollouts": (["rollout.replay=/nowhere"], "step_000000.npz is missing"),
    "a missing checkpoint": (["resume=/nowhere/run"], "no such folder; name a checkpoint or a run directory"),
    "a warm start with other settings": (["sft.output={inputs}/model"], "was made from other settings"),
    # The layout.
    "a layout that does not fit": (["parallel.tp=3"], "parallel.tp=3 does not divide num_attention_heads=4"),
    "stages that do not divide the layers": (
        ["parallel.pp=3"],
        "parallel.pp=3 does not divide num_hidden_layers=4 of this model; use 1, 2, 4.",
    ),
    "expert parallelism without experts": (["parallel.ep=2"], "parallel.ep=2: this model has no experts; use 1."),
    "a world size that is not a multiple of a replica": (
        ["parallel.tp=2", "parallel.cp=2", "parallel.world_size=6"],
        "parallel.world_size=6 is not a multiple of a replica: one replica is tp=2 x cp=2 x pp=1 = 4 processes; use 4 or 8.",
    ),
    "a role without a pool": (
        ["placement.pools={{all: [actor]}}"],
        "this run has engines, which no pool contains (pools: all)",
    ),
    "router replay without experts": (["rollout.routing_replay=true"], "has no experts; leave it false"),
    "a response longer than the context": (
        ["rollout.max_response_tokens=100000"],
        "rollout.max_response_tokens=100000: the model's context of 64 tokens leaves no room for a prompt; use at most 63",
    ),
}
AS_COMMANDS = ("an unknown key", "a reward that raises", "a missing column")
CORE = {"an argument with dashes", "a reward without return", "a damaged model", "a missing column", "an unknown key"}


@pytest.fixture(scope="module")
def commands():
    """Client of a process that has imported `mrl train` and runs each command in a fork."""
    with forked_commands() as running:
        yield running


def fill(mistake, inputs, bad, run):
    overrides, message = MISTAKES[mistake]
    own = [o.format(bad=bad, inputs=inputs) for o in overrides]
    first = [] if any(o.startswith("experiment=") for o in own) else ["experiment=quickstart"]
    return [*first, f"data.inputs.folder={inputs}", *own], message.format(bad=bad, run=run)


PROGRESS = ("mrl train: reading the config", "run directory: ", "waiting for ")  # lines that come before the report


def check_report(output, message, folder):
    assert message in output and "Traceback" not in output, output
    report = [line for line in output.splitlines() if not line.startswith(PROGRESS)]
    assert report[0].startswith("mrl: ") and len(report) <= MAX_LINES, output
    left = {path.name for path in folder.iterdir()} - {"my_parts.py", "__pycache__", "terminal.log"}
    assert left <= {"mrl.log", "hydra", "bad_rows_train.jsonl"}, "the folder has files of a run"


@pytest.mark.extended_except(*CORE)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_cure_before_anything_starts(commands, inputs, bad_files, tmp_path, mistake):
    shutil.copy(bad_files / "my_parts.py", tmp_path)
    overrides, message = fill(mistake, inputs, bad_files, tmp_path)
    tag = uuid.uuid4().hex
    status, output = commands.run([f"run.dir={tmp_path}", *overrides], tmp_path, tag)
    assert status == 2, output
    check_report(output, message, tmp_path)
    wait_until(lambda: not tagged(tag), 120)


@pytest.mark.extended
@pytest.mark.parametrize("mistake", AS_COMMANDS)
def test_the_command_reports_a_mistake_in_the_same_way(start_mrl, inputs, bad_files, mistake):
    overrides, message = fill(mistake, inputs, bad_files, "")
    run = start_mrl("train", *overrides).finish(60)
    assert run.process.returncode == 2, run.output()
    check_report(run.output(), message, run.folder)
    assert run.leftovers() == []
