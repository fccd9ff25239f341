"""Real SGLang servers with weights in FP8: they load what mrl quantizes, and receive pushes in FP8."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from live_engines import UnshardedModel, connected, max_logprob_difference

from models.conversion.fp8_blocks import (
    QUANTIZATION_CONFIG,
    SCALE_SUFFIX,
    dequantize_blocks,
    quantize_blocks,
    quantized_shapes,
)
from mrl.rollout.client import EngineClient
from mrl.weight_sync.disk_sync import ExpectedChecksums
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes

pytestmark = pytest.mark.extended

FP8_TOLERANCE = 0.5  # of log-probabilities: engines round activations to FP8, too
SIZES = dict(hidden_size=256, intermediate_size=384, head_dim=128, num_attention_heads=2, num_key_value_heads=1)


def make_model(folder: Path, seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        **SIZES,
        vocab_size=32,
        num_hidden_layers=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder)
    return model


@dataclass
class QuantizedModel:
    """A model, and what engines in FP8 should hold."""

    folder: Path  # in bfloat16
    model: torch.nn.Module

    def __post_init__(self):
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        self.weights = UnshardedModel(self.folder, tensors)
        self.matrices = {
            n: quantize_blocks(tensors[n]) for n in quantized_shapes(self.weights.rows, self.weights.sizes)
        }

    @property
    def dequantized(self):
        """The weights with which the engine computes. They are exact in bfloat16."""
        return self.weights.tensors | {
            name: dequantize_blocks(*pair).bfloat16() for name, pair in self.matrices.items()
        }

    def write(self, folder: Path) -> Path:
        """Write a Hugging Face folder with weights in FP8, in the form of Qwen3-FP8."""
        from safetensors.torch import save_file

        folder.mkdir()
        shutil.copy(self.folder / "generation_config.json", folder)
        fields = json.loads((self.folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": QUANTIZATION_CONFIG}))
        values = {name: values for name, (values, _) in self.matrices.items()}
        scales = {name + SCALE_SUFFIX: scales for name, (_, scales) in self.matrices.items()}
        save_file(self.weights.tensors | values | scales, folder / "model.safetensors", {"format": "pt"})
        return folder

    def check(self, client: EngineClient) -> None:
        """Compare SGLang's own checksums and log-probabilities. SGLang hashes weights in FP8 after it has dequantized them."""
        layout = EngineLayout.of(self.weights.family, self.weights.arch, EngineParallelSizes())
        expected = ExpectedChecksums(layout, torch.bfloat16)
        tensors = self.dequantized
        assert dict(expected.observe(tensors.items())).keys() == tensors.keys()
        expected.compare(client.checksums(), client.url)
        reference = type(self.model)(self.model.config).float().eval()
        reference.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        assert max_logprob_difference(client, reference) < FP8_TOLERANCE


def test_an_engine_loads_blocks_that_mrl_quantized_and_receives_pushes_of_blocks(one_rank, tmp_path):
    """SGLang's loader puts the blocks of a folder where the weight sync puts them. The second push is a difference."""
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    first = QuantizedModel(tmp_path / "0", make_model(tmp_path / "0", seed=0))
    other = QuantizedModel(tmp_path / "1", make_model(tmp_path / "1", seed=1))
    third = {name: tensor + 0.001 * tensor.abs().sqrt() for name, tensor in other.weights.tensors.items()}
    args = default_server_args("bfloat16", 512) | {"model_path": str(first.write(tmp_path / "fp8"))}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        client = EngineClient(server.url, timeout_s=240)
        first.check(client)
        tensors = dict(first.weights.tensors)
        with connected([server.url], first.folder, tensors, delta=True) as sync:
            tensors.update(other.weights.tensors)
            report = sync.push(1)
            other.check(client)
            num_bytes = {name: tensor.nbytes for name, tensor in tensors.items()}
            for name, (values, scales) in other.matrices.items():
                num_bytes[name] = values.nbytes + scales.nbytes
            assert (
                sum(num_bytes.values()) <= report.uncompressed_bytes < sum(num_bytes.values()) + 16 * len(tensors) * 2
            )
            tensors.update(third)
            other.model.load_state_dict(third)
            report = sync.push(2)
            assert report.bytes < report.uncompressed_bytes and not report.must_repeat
            QuantizedModel(other.folder, other.model).check(client)


def test_a_run_trains_with_engines_in_fp8(start_mrl, inputs, tmp_path):
    """The engines start with random weights, and get the weights of the trainer before they sample."""
    from transformers import AutoTokenizer

    make_model(tmp_path / "model", seed=0).float().save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(tmp_path / "model")
    sizes = [
        "rollout.prompts_per_step=6",
        "rollout.responses_per_prompt=4",
        "trainer.eval_rows=16",
        "trainer.max_steps=2",
    ]
    files = [f"data.inputs.folder={inputs}", "sft.train=null", f"model.path={tmp_path / 'model'}", "trainer.save=false"]
    fp8 = ["sglang.quantization=fp8", "sglang.dtype=bfloat16", "tracking.backends=[]", "trainer.stop_reward=null"]
    run = start_mrl("train", "experiment=quickstart", *sizes, *files, *fp8).finish()
    assert run.process.returncode == 0, run.output()
    assert all(0 < step["mismatch/logprob_abs_max"] < FP8_TOLERANCE for step in run.metrics())
