"""Resume points: whether a run in a folder continues, starts anew, or is refused with a reason."""

import json
import os
import pickle
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from mrl_runs import start_program

from models.architecture import Architecture
from mrl.checkpoint.resume import ResumePoint, check_checkpoint_fits, check_pickles, find_resume_point, model_identity
from mrl.checkpoint.run_dir import check_not_in_use, lock_run_dir, read_run_record
from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.commands import train_process
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.config.secrets import config_as_json
from mrl.controller import memory_check
from mrl.controller.build import finished_result
from mrl.core.jsonl import JsonLinesFile
from parallel.rope import Rope
from parallel.trainer_config import LoraConfig


@cache
def quickstart() -> Config:
    return hydra_entry.compose_config(["experiment=quickstart", "run.dir=/nowhere"])


def config_of(tmp_path, **overrides):
    """Return the quickstart's config in a folder of this test, with dotted keys set."""
    config = quickstart()
    for key, value in ({"run.dir": str(tmp_path / "run")} | overrides).items():
        config = with_key(config, key.split("."), value)
    return config


def with_key(section, names: list[str], value):
    if isinstance(section, dict):
        return section | {names[0]: value}
    inner = value if len(names) == 1 else with_key(getattr(section, names[0]), names[1:], value)
    return replace(section, **{names[0]: inner})


def begin(config, command: str = "train", step: int | None = None, **state) -> None:
    """Write the files that a run with this config leaves."""
    folder = Path(config.run.dir)
    with lock_run_dir(folder, command, config_as_json(config)):
        pass
    if step is not None:
        store = CheckpointStore(folder / "checkpoints")
        partial = store.begin()
        (partial / "actor").mkdir()
        (partial / "actor/shard").write_bytes(os.urandom(50))
        store.commit(partial, step, state | dict(config=config_as_json(config)))


def test_a_run_in_a_new_folder_starts_at_step_0(tmp_path):
    assert find_resume_point(config_of(tmp_path)).checkpoint is None
    assert not (tmp_path / "run").exists()


def test_a_run_continues_from_its_newest_checkpoint(tmp_path):
    config = config_of(tmp_path)
    begin(config, step=4)
    begin(config, step=8)
    found = find_resume_point(config)
    assert found.checkpoint and found.checkpoint.step == 8 and found.changes == ()


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_with_its_logged_rollouts(tmp_path):
    config = config_of(tmp_path)
    begin(config)
    found = find_resume_point(config)
    assert found.checkpoint is None


def test_resume_never_refuses_a_folder_with_a_run(tmp_path):
    begin(config_of(tmp_path), step=4)
    with pytest.raises(ValueError, match=r"has run\.json of a run; name another folder"):
        find_resume_point(config_of(tmp_path, resume="never"))
    assert (
        find_resume_point(config_of(tmp_path, **{"resume": "never", "run.dir": f"{tmp_path}/other"})).checkpoint is None
    )


@pytest.mark.parametrize("command", ["sft", "certify"])
def test_a_folder_of_another_command_is_not_resumed(tmp_path, command):
    begin(config_of(tmp_path), command)
    with pytest.raises(ValueError, match="name another folder"):
        find_resume_point(config_of(tmp_path))


def test_the_folders_own_checkpoint_is_preferred_to_a_named_one_of_another_run(tmp_path):
    source = config_of(tmp_path)
    begin(source, step=4)
    target = config_of(tmp_path, **{"resume": source.run.dir, "run.dir": f"{tmp_path}/second"})
    found = find_resume_point(target)
    assert found.checkpoint and found.checkpoint.step == 4
    begin(target, step=5)  # the second run was preempted, and is started again
    found = find_resume_point(target)
    assert found.checkpoint and found.checkpoint.step == 5
    with pytest.raises(ValueError, match="no such folder"):
        find_resume_point(config_of(tmp_path, **{"resume": "/nowhere", "run.dir": f"{tmp_path}/third"}))


CHANGES = [
    ("trainer.max_steps", 7, False),
    ("parallel.dp", 2, False),
    ("rollout.num_engines", 2, False),
    ("optim.lr", 1e-3, True),
    ("rollout.temperature", 0.5, True),
    ("run.seed", 3, True),
    ("critic.parallel.tp", 2, False),
    ("trainer._target_", "mrl.controller.example_steps.best_of_n", True),
    ("trainer.arguments.keep", 2, True),
]


@pytest.mark.parametrize("key, value, decides", CHANGES)
def test_changed_keys_are_listed_and_logged_rollouts_of_other_settings_are_not_trained(tmp_path, key, value, decides):
    before, now = config_of(tmp_path), config_of(tmp_path, **{key: value})
    begin(before, step=4)
    found = find_resume_point(now)
    assert [change.partition(":")[0] for change in found.changes] == [key] and found.checkpoint
    assert (found.rollout_log_key(now, "data") != found.rollout_log_key(before, "data")) == decides


@pytest.mark.parametrize(
    ("key", "value", "decides"), [("num_engines", 3, False), ("engine_tp", 2, False), ("path", "/other", True)]
)
def test_logged_rollouts_do_not_depend_on_the_number_of_servers_of_a_served_model(tmp_path, key, value, decides):
    judge = {"path": "/judge", "num_engines": 1, "engine_tp": 1}
    before, now = (config_of(tmp_path, roles={"judge": role}) for role in (judge, judge | {key: value}))
    begin(before, step=4)
    found = find_resume_point(now)
    assert [change.partition(":")[0] for change in found.changes] == [f"roles.judge.{key}"]
    assert (found.rollout_log_key(now, "data") != found.rollout_log_key(before, "data")) == decides


def test_logged_rollouts_belong_to_their_data_and_to_the_initial_weights(tmp_path):
    config = config_of(tmp_path)
    begin(config, step=4)
    own = find_resume_point(config)
    assert own.rollout_log_key(config, "data") != own.rollout_log_key(config, "other data")
    assert own.rollout_log_key(config, "data") == ResumePoint().rollout_log_key(config, "data"), (
        "at whatever step the run continues"
    )
    branch = config_of(tmp_path, **{"resume": config.run.dir, "run.dir": f"{tmp_path}/second"})
    assert find_resume_point(branch).of_another_run and not own.of_another_run
    assert find_resume_point(branch).rollout_log_key(branch, "data") != own.rollout_log_key(branch, "data")


def test_a_run_with_only_incomplete_checkpoints_does_not_start_again(tmp_path):
    config = config_of(tmp_path)
    begin(config, step=4)
    (tmp_path / "run/checkpoints/step_000004/state.json").write_text("{")
    with pytest.raises(ValueError, match="none of its checkpoints is complete and undamaged"):
        find_resume_point(config)


@pytest.mark.parametrize("content", ["", '{"command": "tr', "[]", "{}", "null", '{"command": "train"}'])
def test_a_damaged_run_record_is_replaced_by_the_newest_checkpoint_or_refused(tmp_path, caplog, content):
    config = config_of(tmp_path)
    begin(config)
    record = tmp_path / "run/run.json"
    record.write_text(content)
    with pytest.raises(
        ValueError,
        match=r"run\.json is damaged: .* There is no checkpoint that also has the command and the config; "
        "name",
    ):
        find_resume_point(config)
    begin(config, step=4)
    record.write_text(content)
    assert finished_result(config) is None
    found = find_resume_point(config)
    assert found.checkpoint and found.checkpoint.step == 4 and found.changes == ()
    assert "Command and config are taken from" in caplog.text


def test_a_changed_character_of_the_run_record_is_found(tmp_path, caplog):
    config = config_of(tmp_path)
    begin(config, step=4)
    record = tmp_path / "run/run.json"
    record.write_text(record.read_text().replace('"seed": 0', '"seed": 1'))
    assert find_resume_point(config).changes == () and "run.json is damaged: its hash is" in caplog.text


def test_files_of_a_state_that_are_not_a_table_are_refused(tmp_path):
    config = config_of(tmp_path)
    begin(config, step=2)
    begin(config, step=4)
    state = tmp_path / "run/checkpoints/step_000004/state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"files": None}))
    found = find_resume_point(config)
    assert found.checkpoint and found.checkpoint.step == 2


def test_a_run_continues_from_an_older_checkpoint_if_the_newest_is_damaged(tmp_path, caplog):
    config = config_of(tmp_path)
    for step in (4, 8):
        begin(config, step=step)
    shard = tmp_path / "run/checkpoints/step_000008/actor/shard"
    shard.write_bytes(bytes(shard.stat().st_size))
    found = find_resume_point(config)
    assert found.checkpoint and found.checkpoint.step == 4 and found.damaged == {8}
    assert "step_000008: actor/shard is damaged" in caplog.text
    branch = config_of(tmp_path, **{"resume": str(shard.parents[1]), "run.dir": f"{tmp_path}/second"})
    with pytest.raises(
        ValueError, match=r"step_000008: actor/shard is damaged: its hash is .*; use another checkpoint"
    ):
        find_resume_point(branch)


def test_a_checkpoint_of_another_model_is_refused_and_the_differing_sizes_are_named(tmp_path):
    arch = Architecture(32, 64, Rope(rope_theta=10_000.0, dim=32), False, {"num_layers": 4}, {"hidden": 128})
    config = config_of(tmp_path)
    identity = model_identity(arch, LoraConfig(), "unread")
    begin(config, step=4, model=identity)
    resume = find_resume_point(config)
    check_checkpoint_fits(resume, identity, {"actor"})
    with pytest.raises(
        ValueError, match=rf"another model \(vocabulary {arch.vocab_size} instead of {arch.vocab_size + 8}\)"
    ):
        check_checkpoint_fits(resume, identity | dict(vocabulary=arch.vocab_size + 8), {"actor"})
    with pytest.raises(ValueError, match=r"from a run with model\.train_vision=false; set the key to it"):
        check_checkpoint_fits(resume, model_identity(arch, LoraConfig(), "unread", train_vision=True), {"actor"})
    with pytest.raises(ValueError, match="has no critic, which this algorithm needs"):
        check_checkpoint_fits(resume, identity, {"actor", "critic"})
    assert resume.checkpoint
    old = replace(resume, checkpoint=replace(resume.checkpoint, removed=("critic",)))
    check_checkpoint_fits(old, identity, {"actor"})
    with pytest.raises(ValueError, match="the critic of this checkpoint was removed, because it is old"):
        check_checkpoint_fits(old, identity, {"actor", "critic"})


def test_a_checkpoint_of_adapters_fits_only_its_base_model_its_scale_and_its_matrices(tmp_path):
    arch = Architecture(32, 64, Rope(rope_theta=10_000.0, dim=32), False, {"num_layers": 4}, {"hidden": 128})
    config, lora = config_of(tmp_path), LoraConfig(rank=2, alpha=4.0, targets=["v_proj", "q_proj"])
    folders = {name: tmp_path / name for name in ("base", "moved", "tuned")}
    weights = os.urandom(200_000)
    for name, folder in folders.items():
        folder.mkdir()
        content = weights if name != "tuned" else weights[:100_000] + os.urandom(100_000)
        (folder / "model.safetensors").write_bytes(content)
    begin(config, step=4, model=model_identity(arch, lora, str(folders["base"])))
    resume = find_resume_point(config)
    check_checkpoint_fits(resume, model_identity(arch, lora, str(folders["moved"])), {"actor"})
    for changed, folder, message in (
        (lora, "tuned", "belong to a base model with other weights; set model.path"),
        (replace(lora, alpha=8.0), "base", "from a run with lora.alpha=4.0; set the key to it"),
        (replace(lora, rank=4), "base", "from a run with lora.rank=2; set the key to it"),
        (LoraConfig(), "base", "from a run with lora.rank=2; set the key to it"),
        (
            replace(lora, targets=["v_proj"]),
            "base",
            r"from a run with lora.targets=\[q_proj,v_proj\]; set the key to it",
        ),
        (replace(lora, experts=True), "base", "from a run with lora.experts=false; set the key to it"),
    ):
        with pytest.raises(ValueError, match=message):
            check_checkpoint_fits(resume, model_identity(arch, changed, str(folders[folder])), {"actor"})


def test_the_weights_of_the_base_model_are_read_again_only_after_a_change(tmp_path, monkeypatch):
    """A run needs the identity of its model twice at its start."""
    arch = Architecture(32, 64, Rope(rope_theta=10_000.0, dim=32), False, {"num_layers": 4}, {})
    file, opened, open_file = tmp_path / "model.safetensors", [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a, **b: opened.append(path) or open_file(path, *a, **b))
    found = []
    for _ in range(2):
        file.write_bytes(os.urandom(100_000))
        opened.clear()
        found += [model_identity(arch, LoraConfig(rank=2), str(tmp_path)) for _ in range(2)]
        assert opened == [file]
    assert found[0] == found[1] and found[1] != found[2]


def test_the_submission_of_a_job_does_not_read_the_checkpoint(tmp_path, monkeypatch):
    config = config_of(tmp_path, **{"cluster.scheduler": "slurm", "cluster.dry_run": True})
    begin(config, step=4)
    begin(config, step=8)
    found = []

    def plan(config, *, check_hashes: bool = True):
        found.append(find_resume_point(config, check_hashes=check_hashes))
        raise ValueError("planned")

    monkeypatch.setattr(Checkpoint, "check_hashes", None)  # calling it would raise
    monkeypatch.setattr(memory_check, "plan_training", plan)
    with pytest.raises(SystemExit):
        train_process.train(config)
    assert found[0].checkpoint.step == 8
    (tmp_path / "run/checkpoints/step_000008/actor/shard").write_bytes(b"cut")
    assert find_resume_point(config, check_hashes=False).checkpoint.step == 4
    other = config_of(tmp_path, resume=str(tmp_path / "run/checkpoints/step_000004"), **{"run.dir": f"{tmp_path}/b"})
    assert find_resume_point(other, check_hashes=False).checkpoint.step == 4


HOLDER = """
import sys, time
from pathlib import Path
from mrl.checkpoint.run_dir import lock_run_dir
with lock_run_dir(Path(sys.argv[1]), "train", {}):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_runs_never_share_a_folder_and_a_killed_run_releases_it(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run is using it"), lock_run_dir(folder, "train", {}):
            pass
        holder.kill()
        holder.wait(10)
        with lock_run_dir(folder, "train", {"a": 1}):
            pass
    assert read_run_record(folder) == {"command": "train", "config": {"a": 1}}


def test_a_folder_that_a_live_process_writes_to_is_refused_before_the_run_is_planned(tmp_path, monkeypatch, capsys):
    def plan(config):
        raise AssertionError("the run must not be planned")

    monkeypatch.setattr(train_process, "plan_fitting_run", plan)
    config = config_of(tmp_path)
    folder = Path(config.run.dir)
    check_not_in_use(folder)
    assert not folder.exists(), "the check creates nothing"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(SystemExit) as ended:
            train_process.train(config)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and len(said.splitlines()) == 1
        assert f"another run is using it: process {holder.pid} (" in said and "Name another folder" in said
        holder.kill()
        holder.wait(10)
    check_not_in_use(folder)


class Harm:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_foreign_pickle_in_a_checkpoint_is_refused_while_the_run_is_planned(tmp_path):
    config = config_of(tmp_path)
    begin(config, step=4)
    resume = find_resume_point(config)
    assert resume.checkpoint
    actor = resume.checkpoint.path / "actor"
    (actor / "metadata.json").write_text("{}")
    (actor / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(ValueError, match=r"actor/\.metadata: its pickle names posix\.mkdir.*Do not load the file"):
        check_pickles(resume, {"actor"})
    assert not (tmp_path / "harm").exists()
    check_pickles(ResumePoint(), {"actor"})


def test_a_run_whose_folder_was_moved_ends_with_status_1_and_a_message(tmp_path, monkeypatch, capsys):
    @contextmanager
    def moved(plan, preemption, startup):
        folder = tmp_path / "run"
        with lock_run_dir(folder, "train", {}):
            lines = JsonLinesFile(folder / "metrics.jsonl")
            folder.rename(tmp_path / "elsewhere")
            lines.write(1, {})
            yield

    monkeypatch.setattr(train_process, "plan_fitting_run", lambda config: None)
    monkeypatch.setattr(train_process, "rehearse", lambda plan: None)
    monkeypatch.setattr(train_process.build, "trainer", moved)
    with pytest.raises(SystemExit) as ended:
        hydra_entry._run_job(train_process.train, config_of(tmp_path))
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.count("\n") < 6 and "Traceback (most" not in error
    assert error.startswith(f"mrl: {tmp_path}/run/metrics.jsonl was moved, deleted or replaced")
    assert not (tmp_path / "run").exists()


def test_nccl_logs_to_the_run_directory_unless_another_file_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    with lock_run_dir(tmp_path / "a", "train", {}):
        assert "NCCL_DEBUG_FILE" not in os.environ
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "elsewhere")
    with lock_run_dir(tmp_path / "b", "train", {}):
        assert os.environ["NCCL_DEBUG_FILE"] == "elsewhere"
    monkeypatch.delenv("NCCL_DEBUG_FILE")
    with lock_run_dir(tmp_path / "c", "train", {}):
        assert os.environ["NCCL_DEBUG_FILE"] == f"{tmp_path}/c/logs/nccl_%h_%p.log"
    monkeypatch.delenv("NCCL_DEBUG_FILE")


def test_only_processes_that_a_killed_run_left_are_killed(tmp_path):
    folder = tmp_path / "run"
    ours = os.environ | {"MRL_RUN_DIR": str(folder)}
    other = os.environ | {"MRL_RUN_DIR": str(tmp_path / "other")}
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with start_program(sleep, env=ours) as left, start_program(sleep, env=other) as stranger:
        with lock_run_dir(folder, "train", {}):
            assert os.environ["MRL_RUN_DIR"] == str(folder), "for the processes of this part"
            assert left.poll() is not None and stranger.poll() is None
        assert "MRL_RUN_DIR" not in os.environ
        stranger.kill()


def test_the_config_is_stored_as_json(tmp_path):
    config = config_of(tmp_path)
    assert json.loads(json.dumps(config_as_json(config))) == config_as_json(config)
    assert re.fullmatch(r".*run", config_as_json(config)["run"]["dir"])


FINISHED = dict(step=3, window=[0.5, 1.0, 0.75], before={"eval/reward_greedy": 0.0}, after={"eval/reward_greedy": 1.0})


def export_weights(run_dir: Path, step: int) -> None:
    """Write the folder hf/ as a run leaves it that was finished after `step` steps."""
    (run_dir / "hf").mkdir(exist_ok=True)
    (run_dir / "hf/mrl_step.json").write_text(json.dumps({"step": step}))


def test_a_finished_run_is_recognized_without_starting_a_process(tmp_path, monkeypatch, capsys):
    config = config_of(tmp_path, **{"trainer.max_steps": 3, "data.inputs.folder": str(tmp_path / "inputs")})
    begin(config, step=3, progress=FINISHED)
    assert finished_result(config) is None, "the weights were not exported yet"
    export_weights(tmp_path / "run", 2)
    assert finished_result(config) is None, "the run was continued after the export"
    export_weights(tmp_path / "run", 3)
    monkeypatch.setattr(train_process, "plan_fitting_run", None)  # calling it would raise
    train_process.train(config)
    printed = capsys.readouterr().out
    assert "finished already" in printed and "3 steps, mean reward 0.750" in printed and "1.000 after" in printed


@pytest.mark.parametrize(
    "progress, keys",
    [
        (FINISHED, {"trainer.max_steps": 4}),  # a step is left
        (FINISHED | dict(after={}), {}),  # the last evaluation is missing
        (FINISHED, {"resume": "never"}),
        (FINISHED | dict(window=[0.5] * 5), {"trainer.max_steps": 9, "trainer.stop_reward": 0.75}),
    ],
)
def test_a_run_with_something_left_to_do_is_not_finished(tmp_path, progress, keys):
    config = config_of(tmp_path, **({"trainer.max_steps": 3, "data.test": ["held_out.jsonl"]} | keys))
    begin(config, step=3, progress=progress)
    export_weights(tmp_path / "run", 3)
    assert finished_result(config) is None


def test_a_run_that_reached_its_reward_is_finished(tmp_path):
    config = config_of(tmp_path, **{"trainer.max_steps": 9, "trainer.stop_reward": 0.75})
    begin(config, step=5, progress=FINISHED | dict(step=5, window=[0.75] * 5))
    export_weights(tmp_path / "run", 5)
    result = finished_result(config)
    assert result and (result.steps, result.reward) == (5, 0.75)


def test_a_run_that_has_used_its_epochs_is_finished(tmp_path):
    """Two epochs of 10 rows end after 20 prompts. A prompt that waits for a step does not count as used."""
    config = config_of(tmp_path, **{"trainer.max_steps": 9, "trainer.epochs": 2.0})
    for step, waiting, is_finished in ((5, [[19, 3, 0]], False), (6, [], True)):
        state = dict(prompts=dict(rows=[10], drawn=[20]), rollouts=dict(waiting=waiting))
        begin(config, step=step, progress=FINISHED | dict(step=step), **state)
        export_weights(tmp_path / "run", step)
        assert (finished_result(config) is not None) == is_finished
