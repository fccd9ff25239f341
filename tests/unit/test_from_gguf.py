"""`mrl convert from-gguf`: a GGUF file becomes a Hugging Face folder with the same weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mrl.commands.convert import main

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
WORDS = ["<unk>", "<s>", "</s>", *"0123456789+=", "12"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a projection in the order of llama.cpp, which rotates neighboring rows."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        inner, values = name.removeprefix("model.layers.0.").removesuffix(".weight"), tensor.numpy()
        if inner == "lm_head":
            continue
        if inner.endswith(("q_proj", "k_proj")):
            values = interleave(values, 4 if inner.endswith("q_proj") else 2)
        block = "blk.0." if name.startswith("model.layers") else ""
        writer.add_tensor(f"{block}{NAMES[inner]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_and_tokenizer_of_a_gguf_file_are_kept(tmp_path, capsys):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), tie_word_embeddings=True, rms_norm_eps=1e-5, **SIZES))
    write_gguf(tmp_path / "tiny.gguf", model)
    assert main(["from-gguf", f"gguf={tmp_path}/tiny.gguf", f"output={tmp_path}/made", "dtype=float32"]) == 0
    assert f"{tmp_path}/made: a Hugging Face folder" in capsys.readouterr().out
    found = load_file(tmp_path / "made/model.safetensors")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.eos_token_id == 2 and tokenizer.chat_template
    assert main(["from-gguf", f"gguf={tmp_path}/tiny.gguf", f"output={tmp_path}/made"]) == 2
    assert "exists already; name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone.gguf", "no such file; expected a file whose name ends with"), ("bad.gguf", "cannot read it")],
)
def test_a_file_that_is_no_model_is_an_error(tmp_path, capsys, name, said):
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    assert main(["from-gguf", f"gguf={tmp_path / name}", f"output={tmp_path}/made"]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed and not (tmp_path / "made").exists()
