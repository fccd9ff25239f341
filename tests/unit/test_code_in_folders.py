"""A folder with Python files, such as Kimi K2 has, is read without running them. Each file would end the process."""

import json
from pathlib import Path

import pytest
from test_convert_checkpoint import to_hf, to_megatron
from tiny_families import make_family

from models.conversion.hf_reader import HFWeights, check_hf_folder
from models.families import family_of
from mrl.config import hydra_entry
from mrl.controller.plan_step import tokenizer_args
from mrl.data.tokenizer import byte_tokenizer, load_tokenizer, read_tokenizer
from mrl.rollout.client import SamplingParams

CODE = ("configuration_deepseek", "modeling_deepseek", "tokenization_kimi")


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def kimi(tmp_path) -> Path:
    """A tiny DeepSeek-V3 with the model type and the code files of Kimi K2, and with a fast tokenizer."""
    folder = make_family("deepseek_v3", tmp_path / "kimi", n_group=1, topk_group=1)
    byte_tokenizer().save_pretrained(folder)
    for name in CODE:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} has been run')\n")
    classes = dict(AutoConfig="configuration_deepseek.DeepseekV3Config")
    classes |= dict(AutoModelForCausalLM="modeling_deepseek.DeepseekV3ForCausalLM")
    change(folder / "config.json", model_type="kimi_k2", auto_map=classes)
    tokenizer = dict(AutoTokenizer=["tokenization_kimi.TikTokenTokenizer", None])
    change(folder / "tokenizer_config.json", tokenizer_class="TikTokenTokenizer", auto_map=tokenizer)
    return folder


def test_a_folder_of_kimi_k2_is_read_and_written_without_its_code(kimi, tmp_path):
    hf = check_hf_folder(kimi)
    arch = family_of(hf).read(hf)
    family_of(hf).check_engine(hf, arch)
    assert arch.has_latent_attention and not arch.has_sparse_attention
    to_megatron(kimi, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", kimi, tmp_path / "back")
    assert load_tokenizer(kimi).decode(load_tokenizer(tmp_path / "back").encode("12+3")) == "12+3"
    before, after = HFWeights(kimi), HFWeights(tmp_path / "back")
    assert set(before.dtypes()) == set(after.dtypes())
    assert all(before[name].numpy().tobytes() == after[name].numpy().tobytes() for name in before.dtypes())
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "kimi_k2"


@pytest.mark.extended
def test_sglang_reads_the_config_of_kimi_k2_without_its_code(kimi):
    """Engines start without `trust_remote_code`."""
    from sglang.srt.utils.hf_transformers.config import get_config  # the import takes seconds

    config = get_config(str(kimi), trust_remote_code=False)
    assert config.architectures == ["DeepseekV3ForCausalLM"] and config.kv_lora_rank == 20


def test_a_tokenizer_that_is_code_is_not_run(kimi):
    (kimi / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"tokenizer.json is missing; .* The tokenizer of this folder is code, which mrl does"
    ):
        read_tokenizer(kimi)


@pytest.mark.extended
def test_engines_find_stop_texts_only_with_a_tokenizer_that_is_no_code(kimi):
    sampling = SamplingParams(8, stop=("\n",))

    def arguments(*keys: str) -> dict:
        overrides = hydra_entry.check_overrides([f"model.path={kimi}", "model.dtype=float32", "run.dir=out", *keys])
        return tokenizer_args(hydra_entry.compose_config(overrides), sampling, [])

    with pytest.raises(ValueError, match=r"^rollout.stop: engines need the tokenizer .* or use stop_token_ids\.$"):
        arguments()
    assert arguments("+sglang.trust_remote_code=true") == dict(skip_tokenizer_init=False)
    change(kimi / "tokenizer_config.json", auto_map=None)
    assert arguments() == dict(skip_tokenizer_init=False)
