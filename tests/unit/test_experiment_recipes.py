"""Every experiment that is labeled "not run" composes, fits into the memory of its GPUs, and uses whole nodes."""

from pathlib import Path

import pytest
from planned_runs import config_of, folder_of, memory_of

EXPERIMENTS = Path(__file__).resolve().parents[2] / "conf" / "experiment"
LABEL = "Planned with `mrl plan`, not run."
GPUS_PER_NODE = 8
RECIPES = {  # experiment -> (model, GPUs)
    "qwen3_0.6b_grpo": ("Qwen3-0.6B", 8),
    "qwen3_4b_dapo": ("Qwen3-4B", 8),
    "qwen3_4b_distill": ("Qwen3-4B", 8),
    "qwen3_8b_ppo": ("Qwen3-8B", 16),
    "qwen3_8b_agent": ("Qwen3-8B", 16),
    "qwen3_30b_a3b_grpo": ("Qwen3-30B-A3B", 16),
    "qwen3_235b_a22b_grpo": ("Qwen3-235B-A22B", 128),
    "glm4.5_air_grpo": ("GLM-4.5-Air", 64),
    "deepseek_v3_grpo": ("DeepSeek-V3", 512),
}
SUPERVISED = "qwen3_0.6b_sft"  # the one recipe of `mrl sft`
QUARTERED = {  # recipe -> overrides for a quarter of its GPUs
    "qwen3_30b_a3b_grpo": ["parallel.world_size=4", "parallel.ep=4", "rollout.engine_tp=4", "rollout.num_engines=1"],
    "qwen3_235b_a22b_grpo": ["parallel.world_size=32", "parallel.ep=4", "rollout.num_engines=4"],
    "deepseek_v3_grpo": ["parallel.world_size=128", "parallel.ep=8", "rollout.num_engines=4"],
}


def planned(experiment, folder, *overrides):
    model, _ = RECIPES[experiment]
    teacher = [f"roles.teacher.path={folder_of('Qwen3-8B', folder)}"] if experiment.endswith("distill") else []
    return config_of(model, folder, "plan.prompt_tokens=1024", *teacher, *overrides, experiment=experiment)


def test_every_planned_recipe_is_labeled_and_checked_here():
    labeled = {file.stem for file in EXPERIMENTS.glob("*.yaml") if LABEL in " ".join(file.read_text().split("\n# "))}
    assert labeled == RECIPES.keys() | {SUPERVISED}


@pytest.mark.extended
@pytest.mark.parametrize("experiment", RECIPES)
def test_a_recipe_fits_on_whole_nodes_of_h100(experiment, tmp_path):
    config, (_, gpus) = planned(experiment, tmp_path), RECIPES[experiment]
    memory = memory_of(config)
    assert memory.fits and memory.gpus == gpus, memory.problems
    assert gpus % GPUS_PER_NODE == 0 and (config.cluster.scheduler == "slurm") == (gpus > GPUS_PER_NODE)
    assert config.run.name == experiment


@pytest.mark.extended
@pytest.mark.parametrize("experiment", QUARTERED)
def test_a_large_recipe_does_not_fit_on_a_quarter_of_its_gpus(experiment, tmp_path):
    assert not memory_of(planned(experiment, tmp_path, *QUARTERED[experiment])).fits


@pytest.mark.extended
def test_the_supervised_recipe_composes(tmp_path):
    config = config_of("Qwen3-0.6B", tmp_path, experiment=SUPERVISED)
    assert config.sft.train and config.parallel.dp == GPUS_PER_NODE and config.cluster.hardware.name == "h100"
