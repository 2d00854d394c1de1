"""`python -m dsa_bench.engines vllm|sglang MODEL`: an engine with and without dsa's plugin, in turns on one GPU.

Prints a line of JSON per load: the medians of each side, and how many times faster the plugin is.
"""

import argparse
import sys
from collections.abc import Sequence

from dsa_bench.engines.command import add_engine, check_engine, json_object, positive, print_rows
from dsa_bench.engines.rows import SIZES, all_loads, rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.engines", description=__doc__.splitlines()[0])
    add_engine(parser)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(SIZES)} (default: all)")
    parser.add_argument("--rounds", type=positive, default=2, help="runs of each load on each side (2)")
    parser.add_argument("--only", default="", help="run the loads whose names contain this text")
    parser.add_argument("--trace", action="store_true", help="add what each kernel took")
    parser.add_argument("--options", type=json_object, default={}, help="JSON: options of the engine, for both sides")
    args = parser.parse_args(arguments)
    models = args.models or list(SIZES)
    if unknown := set(models) - SIZES.keys():
        parser.error(f"MODEL: got {', '.join(sorted(unknown))}; accepted are {', '.join(SIZES)}")
    names = [load.name for model in models for load in all_loads(model)]
    if not any(args.only in name for name in names):
        parser.error(f"--only: got {args.only!r}; the loads are {', '.join(map(repr, dict.fromkeys(names)))}")
    check_engine(parser, args)
    run = {"only": args.only, "rounds": args.rounds, "trace": args.trace, "logs": args.logs}
    return print_rows(rows(args.engine, models, options=args.options, **run))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
