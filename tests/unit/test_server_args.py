"""Checks and defaults of SGLang's server arguments."""

import ast
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.rollout.engines.server_args import (
    DUMP_VARIABLE,
    NCCL_VARIABLES,
    RESERVED_ARGS,
    REWARD_MODELS,
    UNSYNCED_ARGS,
    block_fp8_args,
    check_server_args,
    check_synced_args,
    default_server_args,
    memory_saver_args,
    nccl_environment,
    releases_cuda_graphs,
    server_arg_names,
)


def test_an_engine_on_a_gpu_has_attention_kernels_for_its_dtype():
    assert default_server_args("float32", 64, device="cuda")["attention_backend"] == "triton"
    assert "attention_backend" not in default_server_args("bfloat16", 64, device="cuda"), "SGLang chooses"


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


@pytest.mark.parametrize("name", UNSYNCED_ARGS)
def test_engines_that_cannot_take_new_weights_are_refused_in_training(name):
    check_server_args({name: "awq"})  # a command without a trainer may use it
    check_synced_args({name: None})
    with pytest.raises(ValueError, match=rf"sglang\.{name}=awq: .* from the trainers; remove this argument"):
        check_synced_args({name: "awq"})


def test_engines_with_block_scales_are_started_with_random_weights():
    check_synced_args({"quantization": "fp8"})
    check_server_args(block_fp8_args())
    assert block_fp8_args()["load_format"] == "dummy"
    assert json.loads(block_fp8_args()["json_model_override_args"]) == {
        "quantization_config": dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128])
    }


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_sglang_has_the_reward_models_that_a_run_serves(name):
    from sglang.srt.configs.model_config import is_generation_model

    files = Path(find_spec("sglang").submodule_search_locations[0], "srt/models").glob("*.py")
    assert sum(f"\nclass {name}(" in file.read_text() for file in files) == 1
    assert not is_generation_model([name]), "SGLang knows that it is no language model"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_are_arguments_that_users_may_change(device):
    defaults = default_server_args("bfloat16", 4096, device=device)
    check_server_args(defaults)
    assert (defaults["dtype"], defaults["context_length"], defaults["device"]) == ("bfloat16", 4096, device)


def test_on_a_gpu_an_engine_is_ready_only_after_its_first_request_has_compiled_kernels():
    assert not default_server_args("bfloat16", 512, device="cuda")["skip_server_warmup"]
    assert default_server_args("float32", 512, device="cpu")["skip_server_warmup"], "a CPU compiles nothing"


@pytest.mark.extended
def test_the_check_does_not_import_sglang_or_torch():
    """The driver checks arguments before it starts anything, and these imports take seconds."""
    code = (
        "import sys; from mrl.rollout.engines.server_args import *; check_server_args({'log_level': 'info'});"
        "default_server_args('float32', 64); from mrl.rollout import client; from mrl.rollout.engines import server;"
        "sys.exit(bool({'sglang', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def sglang_environment(environment: dict[str, str], **server_args) -> dict[str, str]:
    """Run the statements of SGLang's source that set variables of NCCL, and return the resulting environment."""
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
    assert engine == trainer and trainer.keys() == {*NCCL_VARIABLES, DUMP_VARIABLE}
    if not server_args and not user:
        assert sglang_environment({DUMP_VARIABLE: "0"}) == trainer, "the values that SGLang would choose"


def test_a_user_can_have_torch_write_its_log_of_collectives():
    assert nccl_environment({}, {})[DUMP_VARIABLE] == "0"
    assert nccl_environment({}, {DUMP_VARIABLE: "1"})[DUMP_VARIABLE] == "1"


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        memory_saver_args("cuda"),
        dict(cuda_graph_backend_prefill="full"),
        dict(cuda_graph_backend_prefill="breakable"),
        dict(disable_prefill_cuda_graph=True),
        dict(disable_prefill_cuda_graph=True, cuda_graph_backend_decode="breakable"),
        dict(disable_cuda_graph=True),
        dict(cuda_graph_config=dict(prefill=dict(backend="disabled"))),
        dict(cuda_graph_backend_prefill="disabled", cuda_graph_config=dict(prefill=dict(backend="breakable"))),
    ],
    ids=str,
)
def test_only_engines_that_sglang_can_start_release_the_memory_of_their_cuda_graphs(monkeypatch, chosen):
    """SGLang's own code chooses the kinds of graphs, and refuses the memory saver for some of them."""
    from sglang.srt.arg_groups import cuda_graph_hook
    from sglang.srt.model_executor.runner_backend import breakable_cuda_graph_backend, full_cuda_graph_backend, utils

    resolved: dict = {}
    monkeypatch.setattr("sglang.srt.utils.is_cuda", lambda: True)
    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda args: args)
    monkeypatch.setattr(cuda_graph_hook, "declare_resolution", lambda *_, **fields: resolved.update(fields))
    cuda_graph_hook.parse_cuda_graph_config(SimpleNamespace(**dict.fromkeys(server_arg_names()) | chosen))
    phases = resolved["cuda_graph_config"]
    execution = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=phases, debug_cuda_graph=False),
        features=SimpleNamespace(enable_memory_saver=True),
    )
    monkeypatch.setattr(utils, "get_exec", lambda: execution)
    saver = SimpleNamespace(create=lambda enable: SimpleNamespace(enabled=enable))
    for module in (full_cuda_graph_backend, breakable_cuda_graph_backend):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_group=None), raising=False)
        monkeypatch.setattr(module, "TorchMemorySaverAdapter", saver)
    model = SimpleNamespace(device="cuda", tp_group=None)
    runner = SimpleNamespace(device_module=None, model_runner=model)

    def build_graphs(variable: str) -> None:
        monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", variable)
        if phases.prefill.backend != "disabled":
            utils.resolve_prefill_backend(runner)
        if phases.decode.backend != "disabled":
            utils.resolve_decode_backend(runner)

    build_graphs("0")
    if releases_cuda_graphs(chosen | dict(enable_memory_saver=True)):
        build_graphs("1")
    else:
        with pytest.raises(NotImplementedError, match="not compatible with memory saver"):
            build_graphs("1")
    assert not releases_cuda_graphs(chosen | dict(enable_memory_saver=False))
