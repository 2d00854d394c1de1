"""`dsa check`: what is installed, and whether every op computes the right thing here."""

import argparse

from dsa_layers import options


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("check", help="print versions, GPU and backend, and test every op")
    parser.set_defaults(run=run)
    parser.add_argument(
        "--seeds", type=options.positive, default=1, help="test every op with that many sets of random numbers"
    )


def run(args: argparse.Namespace) -> int:
    from dsa_layers.command.health import check

    return 0 if check(args.seeds) else 1
