"""`dsa compile`: the kernels of a model, compiled before it runs, also without a GPU."""

import argparse
import importlib.util
import os

from tqdm import tqdm

from dsa_layers import Precision, read_config
from dsa_layers.command.messages import say
from dsa_layers.command.model import precision_options
from dsa_layers.engine.split import DoesNotDivide
from dsa_layers.io.directory import checkpoint_directory
from dsa_layers.io.loading import check_quantised_sizes


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError("nvidia-cutlass-dsl is not installed, which compiles the kernels; it is there for Linux")
    from dsa.runtime.compile_cache import cache_dir, private_folder
    from dsa_layers.compilation.build import build
    from dsa_layers.compilation.variants import model_variants, precisions

    config = share = read_config(checkpoint_directory(args.model, weights=False))
    if args.heads is not None:
        share = config.with_heads(args.heads)
        check_quantised_sizes(share, Precision.of(share, dequantize=bool(args.dequantize)), args.model)
    chosen = precisions(config, **precision_options(args, dequantize=False))
    directory = args.out or cache_dir()
    if directory is None:
        raise ValueError("--out: must be given if DSA_CACHE_DIR is empty")
    try:
        directory = private_folder(directory)
    except OSError as error:
        raise ValueError(f"--out: {directory} cannot be used: {error.strerror or error}") from None

    say(f"{args.model}: looking for what its passes ask for")
    variants = set(model_variants(share, chosen, drafts=args.draft))
    gpus = config.num_attention_heads // share.num_attention_heads
    if gpus > 1:
        try:
            variants.update(model_variants(config, chosen, drafts=args.draft, gpus=gpus))
        except DoesNotDivide as error:
            say(f"Note: none for dsa generate --gpus {gpus}: {error}")
    work = build(sorted(variants, key=repr), directory, args.jobs or len(os.sched_getaffinity(0)))
    compiled = sum(new for _, new in tqdm(work, desc="Compiling", total=len(variants), unit="kernel", disable=None))
    print(f"{directory}: {compiled} kernels compiled, {len(variants) - compiled} were there")
    return 0
