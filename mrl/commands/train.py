"""`mrl train`: reinforcement learning, from config to exported model; with -m a sweep of such runs."""

import sys

from mrl.commands import supervised


def main(argv: list[str]) -> int:
    """Entry point of `mrl train`: nothing is imported here that takes time."""
    if "-m" in argv or "--multirun" in argv:
        from mrl.commands import sweep

        return sweep.main(argv)
    argv = ["cluster.dry_run=true" if word == "--dry-run" else word for word in argv]
    return supervised.supervise("mrl.commands.training", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
