"""`mrl train`: trains a model with reinforcement learning. With -m it runs a sweep."""

import sys

from mrl.launch import supervisor


def main(argv: list[str]) -> int:
    """Start and supervise the training process. The supervising process imports only what it needs, so it starts quickly."""
    argv = ["cluster.dry_run=true" if word == "--dry-run" else word for word in argv]
    if "-m" in argv or "--multirun" in argv:
        from mrl.commands import sweep  # imported here, because it imports Hydra

        return sweep.main(argv)
    # With options such as --cfg and --help, the command must print nothing but its result.
    prints_only = any(word.startswith("-") for word in argv) or "cluster.dry_run=true" in argv
    if not prints_only:
        sys.stderr.write("mrl train: reading the config\n")
    return supervisor.supervise("mrl.commands.train_process", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
