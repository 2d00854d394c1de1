"""`python -m dsa_bench.e2e NAME [OPTION...]`: a benchmark of whole passes.

Prints a line of JSON per row, and the time of each step to standard error. Benchmarks that compile their kernels in
advance accept --compile, which only compiles and needs no GPU.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

from dsa.runtime import backends
from dsa_bench.e2e import command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e", description=__doc__.splitlines()[0])
    benchmarks = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name in command.NAMES:
        module = command.load(name)
        about = module.__doc__.split("\n\n")[0].replace("\n", " ")
        one = benchmarks.add_parser(name, help=about, description=about)
        for flag, options in module.OPTIONS.items():
            one.add_argument(flag, **options)
        if hasattr(module, "asked"):
            one.add_argument("--compile", action="store_true", help="only compile the kernels, which needs no GPU")
    args = vars(parser.parse_args(arguments))
    name, only_compile = args.pop("name"), args.pop("compile", False)
    if only_compile:
        command.compile_ahead(partial(command.load(name).asked, **args), command.seconds_told())
        return 0
    if reason := backends.why_no_kernels():
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    try:
        for row in command.compiled_rows(name, **args):
            print(json.dumps(row), flush=True)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
