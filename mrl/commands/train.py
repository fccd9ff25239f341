"""`mrl train`: trains a model with reinforcement learning; -m runs a sweep."""

import sys

from mrl.launch import supervisor


def main(argv: list[str]) -> int:
    """Supervise the training process; imports nothing that takes time."""
    if "-m" in argv or "--multirun" in argv:
        from mrl.commands import sweep  # imports Hydra

        return sweep.main(argv)
    argv = ["cluster.dry_run=true" if word == "--dry-run" else word for word in argv]
    return supervisor.supervise("mrl.commands.train_process", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
