"""`python -m dsa_bench.engines vllm|sglang MODEL`: an engine with and without dsa's plugin, in turns on one GPU.

Prints a line of JSON per load: the medians of each side, and how many times faster the plugin is.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dsa_bench.e2e.stacks import STACKS, with_layers
from dsa_bench.engines import loads
from dsa_bench.engines.turns import compare, started
from dsa_layers.families.published import published_config

ENGINES = ("vllm", "sglang")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.engines", description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", choices=STACKS, metavar="MODEL", help=", ".join(STACKS))
    parser.add_argument("--layers", type=int, default=12, help="layers of the model (12)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each load on each side (2)")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests per second of the mixed loads")
    parser.add_argument("--only", default="", help="run the loads whose names contain this text")
    parser.add_argument("--trace", action="store_true", help="add what each kernel took")
    parser.add_argument("--cache-gib", type=int, default=12, help="memory of each side's KV cache (12)")
    parser.add_argument("--logs", type=Path, help="directory for the engines' logs (a temporary one)")
    args = parser.parse_args(arguments)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    file, fields = STACKS[args.model]
    config = published_config(file) | fields | with_layers(args.model, args.layers)
    every = [*loads.PROMPTS, *loads.STEPS, *map(loads.mixed, args.rates)]
    chosen = [load for load in every if args.only in load.name]
    if not chosen:
        parser.error(f"--only: got {args.only!r}; the loads are {', '.join(load.name for load in every)}")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        worker = [args.engine, directory, str(config["vocab_size"]), str(args.cache_gib)]
        with started(worker, args.logs or Path(directory)) as sides:
            for load in chosen:
                row = {"engine": args.engine, "model": args.model, "layers": args.layers}
                print(json.dumps(row | compare(sides, load, args.rounds, args.trace)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
