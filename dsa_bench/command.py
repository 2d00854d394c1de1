"""`dsa bench` and `dsa tune`: time ops and their peers, and search tile configurations."""

import argparse
import importlib.util
from functools import partial

from dsa_bench.harness.benchmarks import benchmarks, tunable
from dsa_layers import options

# {benchmark that is not of one op: the reason why it has no profile}
WHOLES = {"e2e": "e2e splits every row by part", "host": "host times calls, not kernels"}


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="time an op and its peers (needs a GPU with kernels)")
    bench.set_defaults(run=_bench)
    bench.add_argument(
        "op",
        help="e2e: layers of V3.2, V4-Flash and GLM-5 with their real sizes, by part; host: host time per call "
        "of each op; or one of the ops " + ", ".join(benchmarks()),
    )
    bench.add_argument("--csv", type=options.path, help="also write the rows to this file (default: none)")
    bench.add_argument(
        "--png", type=options.path, help="also draw the rows into this file; needs matplotlib (default: none)"
    )
    bench.add_argument(
        "--profile",
        action="store_true",
        help="where the first shape's time goes, by the torch profiler and ncu (default: off)",
    )

    tune = commands.add_parser(
        "tune",
        help="search an op's tile configurations (needs a GPU with kernels)",
        description="Compile every configuration that an op's kernel may have on this GPU, drop those whose results "
        "differ from the reference, time the rest in turns, and write the fastest of each class of shapes as the data "
        "that the op loads.",
    )
    tune.set_defaults(run=_tune)
    tune.add_argument("op", help=f"an op whose kernel has configurations to choose from, one of {', '.join(tunable())}")
    tune.add_argument(
        "--output", type=options.path, help="write the winners here (default: the data that the op loads)"
    )
    tune.add_argument(
        "--jobs",
        type=options.positive,
        help="compiling processes (default: one a core)",
    )


def _bench(args: argparse.Namespace) -> int:
    if args.op not in (*WHOLES, *benchmarks()):
        raise ValueError(f"op: must be {', '.join(WHOLES)} or one of {', '.join(benchmarks())}, got {args.op!r}")
    _check_outputs(args)
    _need_a_gpu("a benchmark")
    if args.profile:
        from dsa_bench.harness import profile

        print(profile.both_tables(args.op))
        return 0
    if args.op == "e2e":
        from dsa_bench.e2e import plot, report, table

        rows, draw = table.printed(report.rows()), plot.write_passes
    else:
        from dsa_bench.harness import case, host, plot, table

        rows, draw = [*host.rows()] if args.op == "host" else case.run(args.op), partial(plot.write_png, args.op)
        table.print_table(args.op, rows)
        if args.op == "linear_layers":
            print(case.load(args.op).summary(rows))
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        draw(rows, args.png)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.profile and args.op in WHOLES:
        raise ValueError(f"--profile: is for one op; {WHOLES[args.op]}")
    if args.profile and (args.csv or args.png):
        raise ValueError("--profile: prints where the time goes; it writes no --csv and no --png")
    options.check_output("--csv", args.csv)
    options.check_output("--png", args.png)
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png: needs matplotlib: pip install matplotlib")


def _tune(args: argparse.Namespace) -> int:
    from dsa_bench.harness import tune

    if args.op not in tunable():
        ops = ", ".join(tunable())
        raise ValueError(f"op: must be one of {ops}, whose kernels have configurations, got {args.op!r}")
    options.check_output("--output", args.output)
    _need_a_gpu("tuning")
    tune.tune(args.op, args.output, args.jobs)
    return 0


def _need_a_gpu(what: str) -> None:
    from dsa.runtime import backends

    if reason := backends.why_no_kernels():
        raise ValueError(f"{what} needs a GPU with kernels: {reason}")
