"""The `dsa` command: generate, check, bench, tune, tiny."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

# Trained by examples/train_indexer.py; its README.md is the model card.
SHIPPED_MODEL = Path(__file__).parent / "stdlib_model"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for something that failed, 2 for a wrong call or input."""
    args = _parser().parse_args(argv)
    warnings.showwarning = lambda message, *_: print(f"Warning: {message}", file=sys.stderr)
    try:
        return args.run(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dsa {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsa", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="continue prompts with a checkpoint")
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        default=SHIPPED_MODEL,
        help="directory with config.json and safetensors; default: a small model of Python source that comes with dsa",
    )
    generate.add_argument("--prompt", action="append", required=True, help="repeat for a batch")
    generate.add_argument("--raw", action="store_true", help="no chat template, even if the tokenizer has one")
    generate.add_argument("--max-new-tokens", type=_positive, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", default=[], help="end at this string; may be repeated")
    generate.add_argument("--device", help="cuda or cpu; default: cuda where there is a GPU")
    generate.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the checkpoint's")
    generate.add_argument("--dequantize", action="store_true", help="quantise nothing: FP8 weights become --dtype")
    generate.add_argument("--kv-cache", choices=("fp8", "model"), help="default: fp8 for FP8 checkpoints")
    generate.add_argument("--cache-tokens", type=_positive, default=65536, help="size of the paged cache")
    generate.add_argument("--prefill-chunk", type=_positive, default=2048, help="prompt tokens a pass")

    check = commands.add_parser("check", help="print versions, GPU and backend, and test every op")
    check.set_defaults(run=_check)
    check.add_argument("--seeds", type=_positive, default=1, help="test every op with that many sets of random numbers")

    bench = commands.add_parser("bench", help="time an op beside its peers (needs a Hopper GPU)")
    bench.set_defaults(run=_bench)
    bench.add_argument("op", help="an op, or e2e: layers of V3.2 and V4-Flash with their real sizes, by part")
    bench.add_argument("--csv", type=Path, help="also write the rows to this file")
    bench.add_argument("--png", type=Path, help="also draw the rows into this file (needs matplotlib)")
    bench.add_argument(
        "--profile", action="store_true", help="where the first shape's time goes, by the torch profiler and ncu"
    )

    tune = commands.add_parser("tune", help="search an op's tile configurations (needs a Hopper GPU)")
    tune.set_defaults(run=_tune)
    tune.add_argument("op")
    tune.add_argument("--output", type=Path, help="write the winners here; default: the data that the op loads")
    tune.add_argument("--jobs", type=_positive, help="compiling processes; default: one a core")

    tiny = commands.add_parser("tiny", help="write a small random checkpoint in a family's published format")
    tiny.set_defaults(run=_tiny)
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--model", choices=("deepseek_v32", "glm_moe_dsa", "deepseek_v4"), default="deepseek_v32")
    tiny.add_argument("--seed", type=int, default=0)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _generate(args: argparse.Namespace) -> int:
    import torch

    import dsa
    from dsa_layers.generation import Generator, TokenEvent
    from dsa_layers.models.loading import load_model
    from dsa_layers.sampling import SamplingParams
    from dsa_layers.tokenizer import Tokenizer

    params = SamplingParams(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed, tuple(args.stop))
    if any(not prompt for prompt in args.prompt):
        raise ValueError("--prompt: must not be empty")
    if not args.checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint}: no such directory; a checkpoint holds config.json and safetensors")
    on_gpu = torch.cuda.is_available()
    device = args.device or ("cuda" if on_gpu else "cpu")
    if device.partition(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"--device: must be cuda or cpu, got {device!r}")
    if device.startswith("cuda") and not on_gpu:
        raise ValueError(f"--device: got {device!r}, but torch sees no CUDA GPU")
    tokenizer = Tokenizer(args.checkpoint)
    prompts = args.prompt
    if tokenizer.has_chat_template and not args.raw:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in prompts]
    model = load_model(
        args.checkpoint,
        device=device,
        dtype=args.dtype and getattr(torch, args.dtype),
        dequantize=args.dequantize,
        kv_cache=args.kv_cache,
    )
    generator = Generator(model, tokenizer, cache_tokens=args.cache_tokens, prefill_chunk=args.prefill_chunk)

    def show(event: TokenEvent) -> None:
        print(event.text, end="", flush=True)

    single = len(prompts) == 1
    completions = generator.generate(prompts, params, on_event=show if single else None)
    if single:
        print()
    else:
        for prompt, completion in zip(args.prompt, completions):
            print(f"[{prompt}]\n{completion.text}\n")
    backend = dsa.backend() if device.startswith("cuda") else "reference"
    print(f"{generator.throughput} ({device}, backend {backend})", file=sys.stderr)
    return 0


def _check(args: argparse.Namespace) -> int:
    from dsa_layers.health import check

    return 0 if check(args.seeds) else 1


def _bench(args: argparse.Namespace) -> int:
    if args.op == "e2e":
        return _bench_e2e(args)
    from dsa_bench.harness import case, plot, profile, table

    module = case.load(args.op)
    _need_a_gpu("a benchmark")
    if args.profile:
        first = module.case(*module.SHAPES[0])
        print(f"{args.op}: {first.name}\n{profile.torch_table(first)}\n{profile.ncu_table(args.op)}")
        return 0
    rows = case.run(args.op)
    table.print_table(args.op, rows)
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        plot.write_png(args.op, rows, args.png)
    return 0


def _bench_e2e(args: argparse.Namespace) -> int:
    from dsa_bench.e2e import plot, report, table

    if args.profile:
        raise ValueError("--profile: is for one op; e2e splits every row by part")
    _need_a_gpu("a benchmark")
    print(table.head())
    rows = []
    for row in report.rows():
        print(table.line(row), flush=True)
        rows.append(row)
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        plot.write_png(rows, args.png)
    return 0


def _tune(args: argparse.Namespace) -> int:
    from dsa_bench.harness import case, tune

    case.load(args.op)
    _need_a_gpu("tuning")
    tune.tune(args.op, args.output, args.jobs)
    return 0


def _need_a_gpu(what: str) -> None:
    from dsa import backends

    if reason := backends.why_no_kernels():
        raise RuntimeError(f"{what} needs a Hopper GPU: {reason}")


def _tiny(args: argparse.Namespace) -> int:
    from dsa_layers.tiny import write_tiny_checkpoint

    write_tiny_checkpoint(args.directory, model=args.model, seed=args.seed)
    print(f"wrote {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
