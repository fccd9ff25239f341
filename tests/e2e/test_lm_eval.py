"""`mrl evaluate evaluate.harness=...` with the real lm_eval, which the test installs into an environment of its own."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.extended

LIMIT = 12
TASK = """task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 7
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOICES = """task: tiny_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{[answer, '77']}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory):
    """Path of lm_eval in a new environment. Without a network, the test is skipped."""
    try:
        urllib.request.urlopen("https://pypi.org/simple/lm-eval/", timeout=10).close()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"no network: {error}")
    folder = tmp_path_factory.mktemp("lm_eval") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin/pip", "install", "--quiet", "lm_eval[api]", "transformers"]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "bin/lm_eval"


@pytest.fixture
def tasks(inputs, tmp_path):
    """Folder with two tasks on the same prompts of the quickstart: one samples answers, one compares log-probabilities."""
    import pyarrow.parquet as pq

    rows = pq.read_table(inputs / "test.parquet").to_pylist()[:LIMIT]
    data = tmp_path / "tiny.json"
    lines = [dict(prompt=row["prompt"][0]["content"], answer=row["reward_model"]["ground_truth"]) for row in rows]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TASK.format(data=data))
    (folder / "tiny_choices.yaml").write_text(CHOICES.format(data=data))
    return folder


def test_lm_eval_runs_its_tasks_with_two_engines(start_mrl, lm_eval, tasks, warm, inputs, monkeypatch, tmp_path):
    """The harness samples greedily. So `mrl evaluate` computes the same accuracy from the harness's sample file."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    keys = ["experiment=quickstart", f"data.inputs.folder={inputs}", f"model.path={warm}"]
    line = f"{lm_eval} --tasks tiny,tiny_choices --include_path {tasks}"
    run = start_mrl(
        "evaluate", *keys, f"evaluate.harness='{line}'", "rollout.num_engines=2", "generate.requests_in_flight=4"
    )
    assert run.finish(480).process.returncode == 0, run.output()
    assert run.leftovers(within_s=30) == []
    report = json.loads((run.folder / "evaluation.json").read_text())["harness"]
    found = {(each["task"], each["metric"]): each for each in report["results"]}
    sampled, compared = found["tiny", "exact_match,none"], found["tiny_choices", "acc,none"]
    assert sampled["samples"] == compared["samples"] == LIMIT
    assert compared["value"]["value"] > 0.5, "the trained model finds the right answer likelier than 77"
    (samples,) = (run.folder / "harness").rglob("samples_tiny_2*.jsonl")
    again = start_mrl("evaluate", *keys, f"evaluate.input={samples}").finish()
    assert again.process.returncode == 0, again.output()
    (summary,) = json.loads((again.folder / "evaluation.json").read_text())["summaries"]
    assert summary["name"] == "tiny" and summary["prompts"] == LIMIT
    assert summary["pass_at"]["1"]["value"] == pytest.approx(sampled["value"]["value"])
