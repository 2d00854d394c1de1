"""`dsa compile`: the kernels of a model, compiled before it runs, also where there is no GPU."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_layers import SHIPPED_MODEL, options
from dsa_layers.command.model_options import CONFIG_HELP, add_draft_option, add_precision_options

if TYPE_CHECKING:
    from dsa_layers.families.model import ModelConfig

_TEXT = """\
Compiles what `dsa generate` would compile when it first needs it: every variant of the kernels that prefill and
decoding of the model ask for, for any number of tokens and sequences. It needs no GPU and reads no weights, only
config.json.
The folder serves every machine whose CPU is of the same architecture and that has the same version of dsa, of the DSL
and of TVM-FFI: copy it there and set DSA_CACHE_DIR to it. What is in it already is not compiled again."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "compile", help="compile a model's kernels in advance, without a GPU", description=_TEXT
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        type=options.path,
        default=SHIPPED_MODEL,
        metavar="CONFIG",
        help=CONFIG_HELP,
    )
    parser.add_argument(
        "--heads",
        type=options.positive,
        metavar="N",
        help="attention heads of one GPU's share, where several GPUs have the model's: for dsa generate --gpus, sums "
        "over the GPUs included, and for engines that split attention by heads (default: all)",
    )
    add_draft_option(parser, "as dsa generate has it")
    parser.add_argument(
        "--out",
        type=options.path,
        metavar="DIR",
        help="the folder; you alone may be able to write to it (default: DSA_CACHE_DIR, else dsa in "
        "XDG_CACHE_HOME, else ~/.cache/dsa)",
    )
    add_precision_options(parser, dequantized="off")
    parser.add_argument(
        "--jobs",
        type=options.of_cpus,
        metavar="N",
        help=f"compiling processes, at most {options.OF_A_CPU} for each CPU that the machine has (default: one a core "
        "that is free to use)",
    )


def run(args: argparse.Namespace) -> int:
    import importlib.util

    from tqdm import tqdm

    if importlib.util.find_spec("cutlass") is None:
        raise ImportError("nvidia-cutlass-dsl is not installed, which compiles the kernels; it is there for Linux")
    from dsa.runtime.compile_cache import private_folder
    from dsa_layers.compilation.build import build
    from dsa_layers.compilation.variants import model_variants, precisions
    from dsa_layers.engine.cuts import DoesNotDivide

    config, share = _configs(args)
    if args.draft and not config.num_nextn_predict_layers:
        raise ValueError(f"--draft: {args.model} has no multi-token-prediction layer; accepted: 0, got {args.draft}")
    chosen = precisions(
        config,
        dtype=args.dtype,
        dequantize=bool(args.dequantize),
        kv_cache=args.kv_cache,
        widen_experts=args.widen_experts,
    )
    directory = _directory(args.out)
    try:
        directory = private_folder(directory)
    except OSError as error:
        raise ValueError(f"--out: {directory} cannot be used: {error.strerror or error}") from None

    started = time.perf_counter()
    print(f"{args.model}: looking for what its passes ask for", file=sys.stderr)
    variants = set(model_variants(share, chosen, drafts=args.draft))
    gpus = config.num_attention_heads // share.num_attention_heads
    if gpus > 1:
        try:
            variants.update(model_variants(config, chosen, drafts=args.draft, gpus=gpus))
        except DoesNotDivide as error:
            print(f"Note: none for dsa generate --gpus {gpus}: {error}", file=sys.stderr)
    compiled = 0
    with tqdm(total=len(variants), desc="Compiling", unit="kernel", disable=None) as bar:
        for _, is_new in build(sorted(variants, key=repr), directory, args.jobs or len(os.sched_getaffinity(0))):
            compiled += is_new
            bar.update()
    seconds = time.perf_counter() - started
    print(f"{directory}: {compiled} kernels compiled, {len(variants) - compiled} were there, {seconds:.0f} s")
    return 0


def _configs(args: argparse.Namespace) -> "tuple[ModelConfig, ModelConfig]":
    """The model's, and the same with a GPU's share of the heads."""
    from dsa_layers.families.config import read_config
    from dsa_layers.families.precision import Precision
    from dsa_layers.io.checks import check_quantised_sizes
    from dsa_layers.io.hub import checkpoint_directory

    config = read_config(checkpoint_directory(args.model, weights=False))
    if args.heads is None:
        return config, config
    try:
        share = config.with_heads(args.heads)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    check_quantised_sizes(share, Precision.of(share, dequantize=bool(args.dequantize)), args.model)
    return config, share


def _directory(chosen: Path | None) -> Path:
    from dsa.runtime.compile_cache import cache_dir

    directory = cache_dir() if chosen is None else chosen
    if directory is None:
        raise ValueError("--out: must be given where DSA_CACHE_DIR is empty")
    return directory
