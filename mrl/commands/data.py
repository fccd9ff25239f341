"""`mrl data`: creates or converts input files."""

import argparse
import sys
from pathlib import Path

from mrl.data.recipes import RECIPES, prepare


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl data`."""
    top = argparse.ArgumentParser(
        prog="mrl data", description="Create input files, or convert data sets to input files."
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="KIND")

    prepare_parser = kinds.add_parser(
        "prepare", help="convert a known data set to parquet with the columns that mrl reads, and extract the answers"
    )
    prepare_parser.add_argument(
        "recipe", choices=sorted(RECIPES), help="; ".join(f"{n}: {r.source_columns}" for n, r in RECIPES.items())
    )
    prepare_parser.add_argument(
        "source", type=Path, help="jsonl file, parquet file, or folder written by datasets.Dataset.save_to_disk"
    )
    prepare_parser.add_argument("target", type=Path, help="parquet file to write")
    prepare_parser.add_argument(
        "--instruction", help="text that is added to each problem (default: the text of the recipe; '' adds nothing)"
    )
    prepare_parser.add_argument(
        "--split", default="train", help="name of the split, which is stored in extra_info (default: %(default)s)"
    )

    tiny = kinds.add_parser(
        "tiny-model", help="create a tiny Qwen3 with random weights and a byte-level tokenizer, for tests"
    )
    tiny.add_argument("folder", type=Path, help="Hugging Face folder to write")
    tiny.add_argument(
        "--context", type=int, default=4096, help="context length of the model in tokens (default: %(default)s)"
    )
    tiny.add_argument("--seed", type=int, default=0)

    arithmetic = kinds.add_parser(
        "arithmetic", help="create the input files of the quickstart: prompts, rows for fine-tuning, tiny model"
    )
    arithmetic.add_argument("folder", type=Path)
    arithmetic.add_argument("--seed", type=int, default=0)
    return top


def main(argv: list[str]) -> int:
    """Entry point of `mrl data`."""
    args = parser().parse_args(argv)
    try:
        message = {"prepare": _prepare, "tiny-model": _tiny_model, "arithmetic": _arithmetic}[args.kind](args)
    except ValueError as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    sys.stdout.write(message + "\n")
    return 0


def _prepare(args: argparse.Namespace) -> str:
    count = prepare(args.recipe, args.source, args.target, args.instruction, args.split)
    return f"{count} rows in {args.target}"


def _tiny_model(args: argparse.Namespace) -> str:
    from mrl.data.synthetic_tasks import make_tiny_model
    from mrl.data.tokenizer import byte_tokenizer

    _refuse_existing(args.folder)
    make_tiny_model(args.folder, byte_tokenizer(), context=args.context, initializer_range=0.02, seed=args.seed)
    return f"tiny Qwen3 in {args.folder}"


def _arithmetic(args: argparse.Namespace) -> str:
    from mrl.data.synthetic_tasks import make_doubling_task

    _refuse_existing(args.folder)
    make_doubling_task(args.folder, args.seed)
    return f"quickstart inputs in {args.folder}"


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ValueError(f"{folder} exists already; name a new folder, or remove this one.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
