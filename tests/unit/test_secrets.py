import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from mrl.config import hydra_entry
from mrl.config.secrets import HIDDEN, authorization, is_secret_name, redacted, refuse_plain_secrets
from mrl.config.validate import from_hydra


def test_names_of_secrets_are_known_and_names_of_tokens_are_not():
    secrets = (
        "api_key",
        "API_KEY",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "hf_token",
        "HF_TOKEN",
        "token",
        "Authorization",
    )
    secrets += (
        "password",
        "ssl_keyfile_password",
        "client_secret",
        "MRL_ENGINE_KEY",
        "RAY_AUTH_TOKEN",
        "WANDB_API_KEY",
    )
    secrets += (
        "x-api-key",
        "X-Api-Key",
        "proxy-authorization",
        "X-Auth-Token",
        "PGPASSWORD",
        "ssl_passphrase",
        "passphrase",
        "api_keys",
        "access_tokens",
        "passwords",
        "client-secrets",
    )
    others = (
        "api_key_env",
        "max_tokens",
        "tokenizer",
        "eos_token",
        "key",
        "num_key_value_heads",
        "stop_token_ids",
        "tokens",
        "stop-tokens",
        "eos-token",
        "max_new_tokens",
        "keys",
        "PWD",
    )
    assert [name for name in secrets if not is_secret_name(name)] == []
    assert [name for name in others if is_secret_name(name)] == []


LITERALS = {
    "a plain value": {"reward": {"api_key": "abc"}},
    "one in a list": {"reward": {"parts": [{"headers": {"Authorization": "Bearer abc"}}]}},
    "a default of the variable": {"token": "${oc.env:NAME,abc}"},
    "a part of the text": {"password": "${oc.env:NAME}-abc"},
    "a number": {"password": 1234},
    "a header": {"reward": {"headers": {"X-Api-Key": "abc"}}},
}


@pytest.mark.parametrize("config", LITERALS.values(), ids=LITERALS)
def test_a_secret_that_is_written_out_is_refused_with_the_cure(config):
    with pytest.raises(ValueError, match=r"holds a secret.* set .*='\$\{oc.env:[A-Z_]+\}'") as refusal:
        refuse_plain_secrets(config)
    assert "abc" not in str(refusal.value) and "1234" not in str(refusal.value)


def test_a_secret_from_the_environment_or_from_another_key_is_fine():
    refuse_plain_secrets(
        {"api_key": "${oc.env:NAME}", "headers": {"authorization": "Bearer ${oc.env:NAME}"}, "password": ""}
    )
    refuse_plain_secrets({"token": "${oc.env:NAME,null}", "secret": "${reward.secret}", "a": {"api_key": None}})


def test_the_command_line_refuses_a_secret_before_anything_is_written():
    with pytest.raises(ValueError, match=r"reward.api_key holds a secret"):
        hydra_entry.check_overrides(["reward.api_key=abc"])
    with pytest.raises(ValueError, match=r"data.template_args.api_key holds a secret"):
        hydra_entry.check_overrides(["data.template_args={api_key: abc}"])
    argv = ["++reward.api_key='${oc.env:NAME}'"]
    assert hydra_entry.check_overrides(argv) == argv


BROKEN_KEYS = ["planted\n", " planted", "plan ted", "plan\tted", "plant\u00e9d", "\x7fplanted", ""]


@pytest.mark.parametrize("key", BROKEN_KEYS)
def test_a_key_that_no_header_can_carry_is_refused_at_the_start_and_not_shown(monkeypatch, capsys, key):
    """Otherwise an HTTP client would raise at each request, with a message that contains the whole header."""
    monkeypatch.setenv("MRL_ENGINE_KEY", key)
    with pytest.raises(SystemExit) as exit:
        hydra_entry.run(["model.path=m"], lambda config: None)
    assert exit.value.code == 2
    told = capsys.readouterr().err
    assert "the key in the environment variable MRL_ENGINE_KEY" in told and "plant" not in told and "ted" not in told
    monkeypatch.setenv("MRL_ENGINE_KEY", "sk-a_b.c~d+e/f==")
    assert authorization() == {"authorization": "Bearer sk-a_b.c~d+e/f=="}


def test_a_config_file_with_a_secret_is_refused():
    with pytest.raises(ValueError, match=r"sglang\.ssl_keyfile_password holds a secret"):
        from_hydra(OmegaConf.create({"sglang": {"ssl_keyfile_password": "abc"}}))


@pytest.mark.extended
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_config_file_with_a_secret_leaves_no_copy_and_no_other_file_is_deleted(tmp_path, command):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/mine.yaml").write_text(
        "# @package _global_\nsglang:\n  ssl_keyfile_password: abc-planted\n"
    )
    run_dir = tmp_path / "run"
    (run_dir / "hydra").mkdir(parents=True)
    (run_dir / "hydra/notes.txt").write_text("my own notes")
    line = [sys.executable, "-m", "mrl.cli", command, "--config-dir", str(tmp_path / "conf"), "experiment=mine"]
    done = subprocess.run(
        [*line, f"run.dir={run_dir}", "model.path=m"], capture_output=True, text=True, cwd=run_dir, timeout=300
    )
    assert done.returncode == 2 and "sglang.ssl_keyfile_password holds a secret" in done.stderr, done.stderr
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    assert [file for file in files if "planted" in file.read_text()] == []
    assert run_dir / "hydra/notes.txt" in files
    assert "planted" not in done.stderr + done.stdout


def test_what_is_written_of_a_config_has_no_secret_by_name_or_by_value(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "s3cret-value")
    monkeypatch.setenv("SHORT_API_KEY", "a")
    config = {
        "run": {"name": "a name", "seed": 0},
        "reward": {"api_key": "anything", "url": "http://judge?key=s3cret-value", "parts": [{"token": 5}, "a"]},
        "betas": (0.9, 0.95),
    }
    assert redacted(config) == {
        "run": {"name": "a name", "seed": 0},
        "reward": {"api_key": HIDDEN, "url": f"http://judge?key={HIDDEN}", "parts": [{"token": HIDDEN}, "a"]},
        "betas": (0.9, 0.95),
    }
    assert config["reward"]["api_key"] == "anything", "a copy"


def test_servers_may_have_keys_of_their_own(monkeypatch):
    monkeypatch.setenv("MRL_ENGINE_KEY", "common")
    monkeypatch.setenv("MRL_ENGINE_KEYS", "http://a:1=one  https://b/=two=2")
    found = [authorization(url)["authorization"] for url in ("http://a:1/", "https://b", "http://c:1", "")]
    assert found == ["Bearer one", "Bearer two=2", "Bearer common", "Bearer common"]
    assert is_secret_name("MRL_ENGINE_KEYS")
    for wrong in ("hidden-key", "http://a:1=ok http://b:1", "http://a:1=hidden-k\u00e9y"):
        monkeypatch.setenv("MRL_ENGINE_KEYS", wrong)
        with pytest.raises(ValueError, match=r"word \d of the environment variable MRL_ENGINE_KEYS: expected") as error:
            authorization()
        assert "hidden" not in str(error.value)
