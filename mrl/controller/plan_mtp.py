"""Checks of the settings of MTP layers (layers for multi-token prediction), before any process starts.

Every function raises ValueError for a mistake in the config. The message names the config key.
"""

from mrl.config.schema import Config

_MEGATRON_CONFLICTS = {
    "pipeline_model_parallel_layout": "mrl puts MTP layers on the last pipeline stage, and does not read this layout",
    "fine_grained_activation_offloading": "Megatron does not find the weights of MTP layers, which it must not offload",
}
"""Fields of Megatron that a run that trains MTP layers cannot set -> the reason."""


def check_mtp_settings(config: Config, head: str) -> None:
    """Raise ValueError if MTP layers cannot be trained as the config says. `head`: output head of the trained model."""
    key = "model.train_mtp=true"
    if head != "vocabulary":
        raise ValueError(
            f"{key}: a reward model has no output layer, which MTP layers need to predict tokens; leave it false."
        )
    if config.lora.rank:
        raise ValueError(
            f"{key} with lora.rank={config.lora.rank}: only the adapters are trained, and MTP layers have none; set "
            "model.train_mtp=false, or lora.rank=0."
        )
    if config.trainer.share_prompts:
        raise ValueError(
            f"{key} with trainer.share_prompts=true: an MTP layer reads the embedding of the next token, so the last token of a "
            "prompt has another state for each response, and responses cannot share it; set trainer.share_prompts=false."
        )
    for name, reason in _MEGATRON_CONFLICTS.items():
        if value := config.megatron.get(name):
            raise ValueError(f"{key} with megatron.{name}={value}: {reason}; leave the field out.")
    group = config.megatron.get("recompute_num_layers") or 1
    if config.megatron.get("recompute_method") == "uniform" and group > 1:
        raise ValueError(
            f"{key} with megatron.recompute_num_layers={group}: Megatron recomputes MTP layers one by one; set it to 1."
        )
