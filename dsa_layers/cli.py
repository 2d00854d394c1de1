"""The `dsa` command: generate, check, bench, tune, tiny."""

# Nothing here is slow to import: torch comes in when a command runs, so that Ctrl-C is caught from the beginning.
import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from dsa_layers.arguments import shown

# Trained by examples/train_indexer.py; its README.md is the model card.
SHIPPED_MODEL = Path(__file__).parent / "stdlib_model"
INTERRUPTED, NO_READER = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # what a shell calls them


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for something that failed, 2 for a wrong call or input; 130 after Ctrl-C, and 141
    where nobody reads the output any more, as of a filter that ends so."""
    command = "dsa"
    try:
        if argv is None:
            _prepare_streams()
        try:
            args = _parser().parse_args(argv)
        finally:  # it exits after --help and --version
            sys.stdout.flush()
        command = f"dsa {args.command}"
        if argv is None:
            _import_torch()
        warnings.showwarning = lambda message, *_: _say(f"Warning: {message}")
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _say("")
        return INTERRUPTED
    except BrokenPipeError:
        return NO_READER
    except OSError as error:
        _say(f"{command}: {f'{error.filename}: {error.strerror}' if error.filename else error}")
        return 2
    except (ValueError, ImportError) as error:
        _say(f"{command}: {error}")
        return 2
    except (RuntimeError, MemoryError) as error:
        _say(f"{command}: {str(error) or 'out of memory'}")
        return 1
    finally:
        _drop_unwritten()
        if argv is None:
            # Another Ctrl-C ends the process at once, without a traceback of what Python tidies up.
            _on_interrupt(signal.SIG_DFL)


def _import_torch() -> None:
    """With everything that commands need. Where Ctrl-C interrupts an import of compiled modules, the exception may be
    taken for another one or get lost, and the command would go on; so it ends the process itself."""
    _on_interrupt(lambda *_: os._exit(INTERRUPTED))
    try:
        import dsa_layers.generation  # noqa: F401
    finally:
        _on_interrupt(signal.default_int_handler)


def _on_interrupt(handler: Callable[..., object] | signal.Handlers) -> None:
    """What Ctrl-C does from now on; nothing where the caller has it ignored, as shells do for background jobs."""
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, handler)


def _say(line: str) -> None:
    """To the standard error, if somebody reads it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def _prepare_streams() -> None:
    """What a terminal's encoding lacks is shown as a question mark; a stream that the caller has closed takes all."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_unwritten() -> None:
    """What the standard output cannot take is lost quietly: Python would print a traceback about it on its way out."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Its errors are one line."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        try:
            version = importlib.metadata.version("dsa-kernels")
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            from dsa import __version__ as version
        print(f"dsa {version}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dsa", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="continue prompts with a checkpoint")
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "checkpoint",
        type=_path,
        nargs="?",
        default=SHIPPED_MODEL,
        help="directory with config.json and safetensors; default: a small model of Python source that comes with dsa",
    )
    generate.add_argument("--prompt", action="append", required=True, help="repeat for a batch")
    generate.add_argument("--raw", action="store_true", help="no chat template, even if the tokenizer has one")
    generate.add_argument("--max-new-tokens", type=_positive, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=_integer, default=0)
    generate.add_argument("--seed", type=_integer)
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
    bench.add_argument("--csv", type=_path, help="also write the rows to this file")
    bench.add_argument("--png", type=_path, help="also draw the rows into this file (needs matplotlib)")
    bench.add_argument(
        "--profile", action="store_true", help="where the first shape's time goes, by the torch profiler and ncu"
    )

    tune = commands.add_parser("tune", help="search an op's tile configurations (needs a Hopper GPU)")
    tune.set_defaults(run=_tune)
    tune.add_argument("op")
    tune.add_argument("--output", type=_path, help="write the winners here; default: the data that the op loads")
    tune.add_argument("--jobs", type=_positive, help="compiling processes; default: one a core")

    tiny = commands.add_parser("tiny", help="write a small random checkpoint in a family's published format")
    tiny.set_defaults(run=_tiny)
    tiny.add_argument("directory", type=_path)
    tiny.add_argument("--model", choices=("deepseek_v32", "glm_moe_dsa", "deepseek_v4"), default="deepseek_v32")
    tiny.add_argument("--seed", type=_seed, default=0)
    return parser


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text[:60]!r}") from None


def _positive(text: str) -> int:
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _seed(text: str) -> int:
    value = _integer(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 2^63, got {value}")
    return value


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _check_output(option: str, path: Path | None) -> None:
    """Raises ValueError for a file that cannot be written, before the work whose result it would hold."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: must be a file, got the directory {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written")


def _text(option: str, text: str) -> str:
    """The text of an option. Bytes unknown to the locale come as surrogates; ValueError if they are no UTF-8."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise ValueError(f"{option}: must be UTF-8, got {shown(text)}") from None


def _generate(args: argparse.Namespace) -> int:
    import torch

    import dsa
    from dsa_layers.generation import Generator, TokenEvent
    from dsa_layers.kv_cache import OutOfPages
    from dsa_layers.models.loading import load_model
    from dsa_layers.models.precision import check_device
    from dsa_layers.sampling import SamplingParams
    from dsa_layers.tokenizer import Tokenizer

    texts = [_text("--prompt", text) for text in args.prompt]
    stop = [_text("--stop", text) for text in args.stop]
    params = SamplingParams(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed, stop)
    if not all(texts):
        raise ValueError("--prompt: must not be empty")
    if not args.checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint}: no such directory; a checkpoint holds config.json and safetensors")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device is None else args.device
    try:
        check_device(device)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    backend = dsa.backend() if device.startswith("cuda") else "reference"
    tokenizer = Tokenizer(args.checkpoint)
    prompts = texts
    if tokenizer.has_chat_template and not args.raw:
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
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
    try:
        completions = generator.generate(prompts, params, on_event=show if single else None)
    except OutOfPages as error:
        raise ValueError(error) from None
    if single:
        print()
    else:
        for prompt, completion in zip(texts, completions):
            print(f"[{prompt}]\n{completion.text}\n")
    _say(f"{generator.throughput} ({device}, backend {backend})")
    failures = [completion.error for completion in completions if completion.error is not None]
    for failure in failures:
        _say(f"dsa generate: {failure}")
    return 1 if failures else 0


def _check(args: argparse.Namespace) -> int:
    from dsa_layers.health import check

    return 0 if check(args.seeds) else 1


def _bench(args: argparse.Namespace) -> int:
    if args.op == "e2e":
        return _bench_e2e(args)
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
    if args.csv:
        table.write_csv(rows, args.csv)
    if args.png:
        plot.write_png(args.op, rows, args.png)
    return 0


def _check_outputs(args: argparse.Namespace) -> None:
    if args.profile and (args.csv or args.png):
        raise ValueError("--profile: prints where the time goes; it writes no --csv and no --png")
    _check_output("--csv", args.csv)
    _check_output("--png", args.png)
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
        plot.write_png(rows, args.png)
    return 0


def _tune(args: argparse.Namespace) -> int:
    from dsa_bench.harness import case, tune

    case.load(args.op)
    _check_output("--output", args.output)
    _need_a_gpu("tuning")
    tune.tune(args.op, args.output, args.jobs)
    return 0


def _need_a_gpu(what: str) -> None:
    from dsa import backends

    if reason := backends.why_no_kernels():
        raise ValueError(f"{what} needs a Hopper GPU: {reason}")


def _tiny(args: argparse.Namespace) -> int:
    from dsa_layers.tiny import write_tiny_checkpoint

    if args.directory.exists() and not args.directory.is_dir():
        raise ValueError(f"directory: must be a directory, got the file {args.directory}")
    write_tiny_checkpoint(args.directory, model=args.model, seed=args.seed)
    print(f"wrote {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
