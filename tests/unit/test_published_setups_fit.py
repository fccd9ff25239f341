"""By mrl's estimate, published training setups fit in memory, but do not fit on half of the smallest number of GPUs.

All cases assume:

- bfloat16, with fp32 gradients, main weights and moments on the GPUs (some published runs keep Adam's state on the CPU);
- full recomputation;
- colocated actor and engines;
- a reserve of 2 GiB per process;
- prompts of 1,024 tokens, responses of 8,192 tokens and packs of 16,384 tokens.
"""

import pytest
from planned_runs import FULL, config_of, memory_of

LENGTHS = ["plan.prompt_tokens=1024", "rollout.max_response_tokens=8192", "trainer.max_tokens_per_micro_batch=16384"]
QWEN_235B = ["megatron.num_layers_in_first_pipeline_stage=11", "megatron.num_layers_in_last_pipeline_stage=11"]
DEEPSEEK = ["megatron.num_layers_in_first_pipeline_stage=3", "megatron.num_layers_in_last_pipeline_stage=2"]

# (model, hardware, number of GPUs, tp, pp, ep, number of ranks of an engine, further overrides)
FIT = [
    ("Qwen3-30B-A3B", "h100", 8, 4, 1, 8, 8, []),
    ("Qwen3-30B-A3B", "h200", 8, 4, 1, 8, 8, []),
    ("Qwen3-30B-A3B", "h100", 16, 4, 1, 8, 8, []),
    ("Qwen3-30B-A3B", "h100", 32, 4, 1, 8, 8, []),
    ("Qwen3-235B-A22B", "h100", 128, 4, 8, 16, 8, QWEN_235B),
    ("Qwen3-235B-A22B", "h100", 64, 4, 8, 8, 8, QWEN_235B),  # needs 72.5 of 79.6 GiB
    ("DeepSeek-V3", "h200", 256, 8, 16, 16, 16, DEEPSEEK),
    ("DeepSeek-V3", "h100", 512, 8, 16, 32, 32, DEEPSEEK),
    ("DeepSeek-V3", "h100", 256, 8, 16, 16, 32, DEEPSEEK),
]
NOT = [
    ("Qwen3-30B-A3B", "h100", 4, 4, 1, 4, 4, []),
    ("Qwen3-30B-A3B", "h200", 2, 2, 1, 2, 2, []),
    ("Qwen3-235B-A22B", "h100", 32, 4, 8, 4, 8, QWEN_235B),
    ("DeepSeek-V3", "h100", 128, 8, 16, 8, 32, DEEPSEEK),
]


def memory_of_case(folder, case):
    model, hardware, gpus, tp, pp, ep, engine_tp, more = case
    layout = [f"parallel.{axis}={size}" for axis, size in dict(tp=tp, pp=pp, ep=ep, etp=1, world_size=gpus).items()]
    engines = [f"rollout.engine_tp={engine_tp}", f"rollout.num_engines={gpus // engine_tp}"]
    run = [f"cluster={hardware}", "placement=colocated", *layout, *engines, *FULL, *LENGTHS, *more]
    return memory_of(config_of(model, folder, *run))


@pytest.mark.extended
@pytest.mark.parametrize("case", FIT, ids=lambda case: f"{case[0]}-{case[2]}-{case[1]}")
def test_a_published_setup_fits(tmp_path, case):
    found = memory_of_case(tmp_path, case)
    assert found.fits and found.gpus == case[2], found.problems


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("case", NOT, ids=lambda case: f"{case[0]}-{case[2]}-{case[1]}")
def test_half_of_the_smallest_setup_does_not_fit(tmp_path, case):
    found = memory_of_case(tmp_path, case)
    assert not found.fits and found.excess > 0
