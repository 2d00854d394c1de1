"""`dsa compile`: compile a model's kernels in advance. This does not need a GPU."""

import argparse
import importlib.util
import os

from tqdm import tqdm

from dsa_layers.command.messages import say
from dsa_layers.command.model import stored_model


def compile(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError("nvidia-cutlass-dsl is not installed, which compiles the kernels; it is there for Linux")
    from dsa.runtime.build import build
    from dsa.runtime.compile_cache import cache_dir, private_folder
    from dsa_layers.compilation import model_variants

    config, precision = stored_model(args)
    directory = args.out or cache_dir()
    if directory is None:
        raise ValueError("--out: must be given if DSA_CACHE_DIR is empty")
    directory = private_folder(directory)

    say(f"{args.checkpoint}: looking for what its passes ask for")
    variants = model_variants(config, precision, drafts=args.draft, gpus=args.gpus)
    work = build(variants, directory, args.jobs or len(os.sched_getaffinity(0)))
    compiled = sum(new for _, new in tqdm(work, desc="Compiling", total=len(variants), unit="kernel", disable=None))
    print(f"{directory}: {compiled} kernels compiled, {len(variants) - compiled} were there")
    return 0
