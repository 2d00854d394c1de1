"""`dsa bench` and `dsa tune`: time ops beside their peers, and search their tile configurations."""

import argparse
import importlib.util

from dsa_bench.harness.benchmarks import benchmarks, tunable
from dsa_layers import options
from dsa_layers.arguments import shown


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="time an op beside its peers (needs a GPU with kernels)")
    bench.set_defaults(run=_bench)
    bench.add_argument(
        "op",
        help="e2e: layers of V3.2, V4-Flash and GLM-5 with their real sizes, by part; host: what a call of each op "
        "takes of the host; or one of the ops " + ", ".join(benchmarks()),
    )
    bench.add_argument("--csv", type=options.path, help="also write the rows to this file")
    bench.add_argument("--png", type=options.path, help="also draw the rows into this file (needs matplotlib)")
    bench.add_argument(
        "--profile", action="store_true", help="where the first shape's time goes, by the torch profiler and ncu"
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
    most = f"at most {options.OF_A_CPU} for each CPU"
    tune.add_argument("--jobs", type=options.of_cpus, help=f"compiling processes, {most} (default: one a core)")


def _bench(args: argparse.Namespace) -> int:
    if args.op in WHOLES:
        return WHOLES[args.op](args)
    if args.op not in benchmarks():
        raise ValueError(f"op: must be {', '.join(WHOLES)} or one of {', '.join(benchmarks())}, got {shown(args.op)}")
    from dsa_bench.harness import case, plot, profile, table

    module = case.load(args.op)
    _check_outputs(args)
    _need_a_gpu("a benchmark")
    if args.profile:
        first = module.case(*module.SHAPES[0])
        print(f"{args.op}: {first.name}\n{profile.torch_table(first)}\n{profile.ncu_table(args.op)}")
        return 0
    rows = case.run(args.op)
    table.print_table(args.op, rows)
    if hasattr(module, "summary"):
        print(module.summary(rows))
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        plot.write_png(args.op, rows, args.png)
    return 0


def _bench_host(args: argparse.Namespace) -> int:
    from dsa_bench.harness import host, plot, table

    if args.profile:
        raise ValueError("--profile: is for one op; host times calls, not kernels")
    _check_outputs(args)
    _need_a_gpu("a benchmark")
    rows = [*host.rows()]
    table.print_table("host", rows)
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        plot.write_png("host", rows, args.png)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.profile and (args.csv or args.png):
        raise ValueError("--profile: prints where the time goes; it writes no --csv and no --png")
    options.check_output("--csv", args.csv)
    options.check_output("--png", args.png)
    if args.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png: needs matplotlib: pip install matplotlib")


def _bench_e2e(args: argparse.Namespace) -> int:
    from dsa_bench.e2e import plot, report, table

    if args.profile:
        raise ValueError("--profile: is for one op; e2e splits every row by part")
    _check_outputs(args)
    _need_a_gpu("a benchmark")
    print(table.head())
    rows = []
    for row in report.rows():
        print(table.line(row), flush=True)
        rows.append(row)
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        plot.write_passes(rows, args.png)
    return 0


# Of no single op.
WHOLES = {"e2e": _bench_e2e, "host": _bench_host}


def _tune(args: argparse.Namespace) -> int:
    from dsa_bench.harness import tune

    if args.op not in tunable():
        ops = ", ".join(tunable())
        raise ValueError(f"op: must be one of {ops}, whose kernels have configurations, got {shown(args.op)}")
    options.check_output("--output", args.output)
    _need_a_gpu("tuning")
    tune.tune(args.op, args.output, args.jobs)
    return 0


def _need_a_gpu(what: str) -> None:
    from dsa.runtime import backends

    if reason := backends.why_no_kernels():
        raise ValueError(f"{what} needs a GPU with kernels: {reason}")
