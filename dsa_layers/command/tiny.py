"""`dsa tiny`: write a small random checkpoint."""

import argparse

from dsa_layers import options
from dsa_layers.families.registry import model_types


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("tiny", help="write a small random checkpoint in a family's published format")
    parser.set_defaults(run=run)
    parser.add_argument("directory", type=options.path, help="new, empty, or of a tiny checkpoint, which is replaced")
    parser.add_argument("--model", choices=model_types(), default="deepseek_v32", help="its `model_type`")
    parser.add_argument("--seed", type=options.seed, default=0, help="of the random weights")


def run(args: argparse.Namespace) -> int:
    from dsa_layers.tiny import write_tiny_checkpoint

    if args.directory.exists() and not args.directory.is_dir():
        raise ValueError(f"directory: must be a directory, got the file {args.directory}")
    write_tiny_checkpoint(args.directory, model=args.model, seed=args.seed)
    print(f"wrote {args.directory}")
    return 0
