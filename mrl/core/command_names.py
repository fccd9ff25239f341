"""Names of the commands of mrl, with one line of help for each, and the names of their subcommands."""

COMMANDS = {
    "train": "train a model with RL (the default experiment runs on any machine)",
    "sft": "train a model on responses or preferences (SFT, DPO and others), or a reward model",
    "report": "write a page that shows a run, two runs side by side, or a sweep",
    "top": "show in the terminal what a run and its processes do now",
    "samples": "show sampled responses of a run with their rewards",
    "timeline": "merge the timelines of all processes of a run into one file, and say what takes the time of the steps",
    "wandb-report": "save a wandb workspace with the sections of the metrics page",
    "generate": "sample responses to a data set, into parquet files",
    "evaluate": "measure pass@k, maj@k and mean score of a model, with confidence intervals",
    "certify": "check that a parallel layout, or an engine, computes what one process of the trainer computes",
    "replay": "repeat a dumped step, and name the first layer whose output is not finite or differs between layouts",
    "plan": "show the memory, placement and weight sync of a config, or search for the fastest layout",
    "doctor": "check this machine, or the hosts of a job, and show a command that fixes each problem",
    "bench": "measure one GPU with mrl's own code: correctness, speed and memory, in at most ten minutes",
    "convert": "convert weights between Hugging Face folders and Megatron checkpoints, and verify the result",
    "family": "propose the table of a new model family from a config of transformers, and prove it",
    "config": "describe the keys of the config: defaults, units, allowed values",
    "data": "create or convert data files",
    "import": "translate a config of verl, slime or trl into overrides of mrl train",
    "completion": "print a completion script for bash, zsh or fish",
}

SUBCOMMANDS = {
    "bench": ("gpu",),
    "plan": ("memory", "placement", "rollout", "search", "sync"),
    "certify": ("engine",),
    "convert": ("to-megatron", "to-hf", "from-gguf", "check"),
    "family": ("derive",),
    "data": ("prepare", "tiny-model", "arithmetic"),
    "import": ("verl", "slime", "trl"),
    "completion": ("bash", "zsh", "fish"),
}
"""Command -> names of its subcommands."""
