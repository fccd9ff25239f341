"""The commands themselves: version, help texts, hints for misspelled commands, and completion scripts."""

import re
import shutil
import subprocess
from importlib.metadata import version

import pytest

from mrl import cli
from mrl.commands import completion
from mrl.config.hydra_entry import is_known_override
from mrl.core.code_locations import CONF
from mrl.core.command_names import COMMANDS, SUBCOMMANDS


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mrl {version('mrl')}\n"


@pytest.mark.parametrize("word, near", [("trian", "train"), ("smaples", "samples"), ("evalute", "evaluate")])
def test_a_misspelled_command_names_the_nearest(word, near, capsys):
    assert cli.main([word]) == 2
    assert capsys.readouterr().err == f"mrl: unknown command {word!r}; did you mean {near!r}?\n"
    assert cli.main(["xyz"]) == 2
    assert "expected one of train, sft" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sft", "certify", "generate", "samples", "completion", "plan", "doctor"])
def test_a_command_prints_its_own_help(command, capsys):
    try:
        status = cli.main([command, "--help"])
    except SystemExit as end:
        status = end.code
    out = capsys.readouterr().out
    assert status == 0 and out.startswith(f"usage: mrl {command}") and "usage: usage" not in out
    assert len(out.splitlines()) < 60


def test_a_wrong_option_shows_usage_once(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--no-such-option"])
    error = capsys.readouterr().err
    assert error.startswith("usage: mrl doctor [--json]") and len(error.splitlines()) <= 3


def test_subcommands_are_those_of_the_commands():
    from mrl.commands import convert, data, family

    assert set(SUBCOMMANDS["convert"]) == set(convert.KINDS)
    kinds = next(action for action in data.parser()._actions if action.dest == "kind")
    assert set(SUBCOMMANDS["data"]) == set(kinds.choices)
    assert set(SUBCOMMANDS["completion"]) == set(completion.SHELLS)
    assert family.main(["--help"]) == 0 and all(f"mrl family {name} " in family.HELP for name in SUBCOMMANDS["family"])
    assert SUBCOMMANDS.keys() <= COMMANDS.keys()


def completions(line: str) -> list[str]:
    """Return what bash offers if the cursor is at the end of the line. Bash splits words at spaces and at =."""
    words = [word for word in re.split(r"(=)|\s+", line) if word]
    words += [""] if line.endswith((" ", "=")) else []
    program = f"""
{completion.bash_script()}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1} COMP_LINE='{line}' COMP_POINT={len(line)}
_mrl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "line, offered",
    [
        ("mrl tr", ["train"]),
        ("mrl plan s", ["search", "sync", "sglang=", "step_dump.steps="]),
        ("mrl convert to", ["to-megatron", "to-hf"]),
        ("mrl train rollout.resp", ["rollout.responses_per_prompt="]),
        ("mrl train expe", ["experiment="]),
        ("mrl train algorithm", ["algorithm=", "algorithm.whiten="]),
        ("mrl train placement=pa", ["paired"]),
        ("mrl train experiment=quick", ["quickstart"]),
        ("mrl train optim.lr=1e-3 rollout.mode=", ["sync", "one_step_off", "async"]),
        ("mrl train trainer.save=f", ["false"]),
        ("mrl completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_commands_keys_groups_and_values(line, offered):
    found = completions(line)
    assert found[: len(offered)] == offered or set(offered) <= set(found)
    prefix = re.split(r"[ =]", line)[-1]
    assert found and all(word.startswith(prefix) for word in found)


@pytest.mark.extended
@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_script_has_every_command_and_only_keys_that_exist(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", script), command
    keys = set(re.findall(r"(?<![\w.$-])([a-z_]+(?:\.[a-z_]+)+)=", script))
    assert len(keys) > 150 and all(is_known_override(f"{key}=null") for key in keys)
    assert not re.search("@[a-z]+@", script), "a place of the template was not filled"
    if shutil.which(shell):
        check = subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, capture_output=True, timeout=60)
        assert check.returncode == 0, check.stderr


def test_every_config_group_is_offered_with_its_files():
    words, values = completion.argument_words(), completion.values_of_keys()
    for folder in (CONF / name for name in ("algorithm", "cluster", "model", "placement", "rollout", "experiment")):
        assert f"{folder.name}=" in words, folder.name
        assert values[folder.name] == sorted(file.stem for file in folder.glob("*.yaml"))
    assert len(words) == len(set(words))


def test_an_unknown_shell_is_refused_with_the_help(capsys):
    assert cli.main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err.startswith("usage: mrl completion bash|zsh|fish")
