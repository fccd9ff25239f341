"""SGLang's platform plug-in: seeded sampling on a CPU uses MurmurHash3 as published, and paused schedulers sleep."""

import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.plugins.hook_registry import HookType

from mrl.rollout.cpu import sglang_platform
from mrl.rollout.cpu.sglang_platform import (
    KV_SCALES,
    LOAD_MODEL,
    PAUSED_LOOP,
    discard_random_kv_scales,
    murmur_hash32,
    round_embedding_scale,
    sleep_while_paused,
)


def murmur3(data: bytes) -> int:
    """Return MurmurHash3_x86_32 with seed 0 of whole 4-byte blocks, after Appleby's reference."""
    state, low = 0, 0xFFFFFFFF

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & low

    for (block,) in struct.iter_unpack("<I", data):
        state ^= (rotated(block * 0xCC9E2D51 & low, 15) * 0x1B873593) & low
        state = (rotated(state, 13) * 5 + 0xE6546B64) & low
    state ^= len(data)
    state = ((state ^ state >> 16) * 0x85EBCA6B) & low
    state = ((state ^ state >> 13) * 0xC2B2AE35) & low
    return state ^ state >> 16


def test_the_hash_equals_a_reference_implementation():
    assert murmur3(b"test") == 0xBA6BD213, "the published value"
    seeds, positions, columns = [0, 1, 2**62 + 12345, 2**63 - 1], [0, 5, 4095, 2**31 - 1], [0, 1, 151_935]
    found = murmur_hash32(
        torch.tensor(seeds, dtype=torch.int64).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    expected = [[murmur3(struct.pack("<QII", s, p, c)) for c in columns] for s, p in zip(seeds, positions, strict=True)]
    assert found.tolist() == expected


def test_neighboring_columns_and_seeds_are_independent():
    seeds = torch.arange(2000, dtype=torch.int64).to(torch.uint64)
    uniform = murmur_hash32(seeds, torch.full((2000,), 7), torch.arange(50)).double().numpy() / 2**32
    assert abs(uniform.mean() - 0.5) < 0.005 and abs(uniform.var() - 1 / 12) < 0.002
    between = np.corrcoef(uniform.T) - np.eye(50)
    assert np.abs(between).max() < 0.12, "five standard errors for 2000 seeds"
    assert abs(np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]) < 0.02, "neighboring seeds"


def test_a_paused_scheduler_of_a_gpu_sleeps_too(monkeypatch):
    """SGLang spawns its processes on a GPU, so each process registers the hook when it looks for a platform."""
    registered: list = []
    monkeypatch.setattr(sglang_platform.HookRegistry, "register", lambda *args: registered.append(args))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert sglang_platform.activate() is None
    assert registered == [
        (PAUSED_LOOP, sleep_while_paused, HookType.AFTER),
        (KV_SCALES, discard_random_kv_scales, HookType.BEFORE),
        (LOAD_MODEL, round_embedding_scale, HookType.AFTER),
    ]
    calls: list[str] = []
    sleep_while_paused(None, SimpleNamespace(maybe_sleep_on_idle=lambda: calls.append("slept")))
    assert calls == ["slept"]


@pytest.mark.parametrize(("load_format", "used"), [("dummy", 1.0), ("auto", 0.25)])
def test_an_engine_with_random_weights_does_not_use_random_scales_of_its_kv_cache(monkeypatch, load_format, used):
    """A file may contain scales. With random weights, SGLang itself would use random scales."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(load_format=load_format))
    method, layer = BaseKVCacheMethod(None), torch.nn.Module()
    method.create_weights(layer)
    layer.k_scale.fill_(0.25)
    layer.v_scale.fill_(0.25)
    discard_random_kv_scales(method, layer)
    method.process_weights_after_loading(layer)
    assert layer.k_scale_float == layer.v_scale_float == layer.k_scale.item() == used


def test_engines_of_gemma_3_round_the_factor_of_the_embeddings_as_transformers_does():
    from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding as OfSGLang
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding as OfTransformers

    scale, ids = 1152**0.5, torch.arange(41)
    engine, reference = (kind(41, 16, 0, embed_scale=scale).bfloat16() for kind in (OfSGLang, OfTransformers))
    engine.weight = reference.weight
    assert not torch.equal(engine(ids), reference(ids)), "33.94 is rounded to 34"
    runner = SimpleNamespace(model=torch.nn.Sequential(engine))
    round_embedding_scale(None, SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner)))
    assert torch.equal(engine(ids), reference(ids))
