"""Checks and defaults of SGLang's server arguments."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.rollout.engines.server_args import (
    NCCL_VARIABLES,
    RESERVED_ARGS,
    check_server_args,
    default_server_args,
    nccl_environment,
    server_arg_names,
)


def test_argument_names_from_the_source_are_those_of_the_class():
    from sglang.srt.server_args import ServerArgs

    assert server_arg_names() == {name for name in ServerArgs.__struct_fields__ if not name.startswith("_")}


def test_an_unknown_argument_is_refused_with_its_nearest_match():
    with pytest.raises(
        ValueError, match=r"sglang\.mem_fraction_sttic is not an argument.*did you mean sglang\.mem_fraction_static"
    ):
        check_server_args({"mem_fraction_sttic": 0.5})


@pytest.mark.parametrize("name", RESERVED_ARGS)
def test_arguments_that_mrl_sets_are_refused(name):
    with pytest.raises(ValueError, match=rf"sglang\.{name}=1 is set by mrl; "):
        check_server_args({name: 1})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_are_arguments_that_users_may_change(device):
    defaults = default_server_args("bfloat16", 4096, device=device)
    check_server_args(defaults)
    assert (defaults["dtype"], defaults["context_length"], defaults["device"]) == ("bfloat16", 4096, device)


def test_on_a_gpu_an_engine_is_ready_only_after_its_first_request_has_compiled_kernels():
    assert not default_server_args("bfloat16", 512, device="cuda")["skip_server_warmup"]
    assert default_server_args("float32", 512, device="cpu")["skip_server_warmup"], "a CPU compiles nothing"


def test_the_check_does_not_import_sglang_or_torch():
    """The driver checks arguments before it starts anything, and these imports take seconds."""
    code = (
        "import sys; from mrl.rollout.engines.server_args import *; check_server_args({'log_level': 'info'});"
        "default_server_args('float32', 64); from mrl.rollout import client; from mrl.rollout.engines import server;"
        "sys.exit(bool({'sglang', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def sglang_environment(environment: dict[str, str], **server_args) -> dict[str, str]:
    """Run the statements with which SGLang's source sets variables of NCCL, and return the environment of the engine."""
    source = Path(find_spec("sglang").submodule_search_locations[0], "srt/entrypoints/engine.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == "_set_envs_and_config"]
    statements = [node for node in function.body if any(repr(name) in ast.dump(node) for name in NCCL_VARIABLES)]
    statements = [node for node in statements if "is_mnnvl_fabric_device" not in ast.dump(node)]
    assert len(statements) == len(NCCL_VARIABLES)
    cfg = SimpleNamespace(**dict(enable_symm_mem=False, enable_nccl_nvls=False) | server_args)
    names = dict(os=SimpleNamespace(environ=environment), cfg=cfg, kv_shard_symmetric_scratch=False)
    exec(compile(ast.Module(statements, []), "engine.py", "exec"), names)
    return environment


@pytest.mark.parametrize("server_args", [{}, dict(enable_symm_mem=True), dict(enable_nccl_nvls=True)], ids=str)
@pytest.mark.parametrize("user", [{}, dict(NCCL_CUMEM_ENABLE="1"), dict(NCCL_NVLS_ENABLE="0")], ids=str)
def test_trainer_ranks_and_engines_have_the_same_nccl_variables(user, server_args):
    trainer = user | nccl_environment(server_args, user)
    engine = sglang_environment(dict(trainer), **server_args)
    assert engine == trainer and trainer.keys() == NCCL_VARIABLES.keys()
    if not server_args and not user:
        assert sglang_environment({}) == trainer, "the values that SGLang would choose"
