"""`dsa tiny`: write a small random checkpoint."""

import argparse

from dsa_layers.tiny import write_tiny_checkpoint


def run(args: argparse.Namespace) -> int:
    write_tiny_checkpoint(args.directory, model=args.model, seed=args.seed)
    print(f"wrote {args.directory}")
    return 0
