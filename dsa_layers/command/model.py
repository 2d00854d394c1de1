"""`dsa plan`, `dsa convert`, `dsa tiny` and `dsa compile`, and functions that load the model that a command's options
name, on one device or several ranks."""

import argparse
import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dsa.runtime import backends
from dsa_layers import (
    SHIPPED_MODEL,
    Precision,
    Ranks,
    Tokenizer,
    convert_checkpoint,
    load_model,
    read_config,
    write_tiny_checkpoint,
)
from dsa_layers.command.parser import MOST_GPUS, say, say_json
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.split import DoesNotDivide
from dsa_layers.errors import CheckpointError
from dsa_layers.io import gpu_plan
from dsa_layers.io.directory import Checkpoint, checkpoint_directory
from dsa_layers.io.gpu_plan import GpuPlan, check_fits, plans
from dsa_layers.io.loading import precision_of
from dsa_layers.models.precision import check_device
from dsa_layers.models.protocols import Model
from dsa_layers.parallel.launch import launch, started_ranks
from dsa_layers.parallel.ranks import join


def start_ranks(args: argparse.Namespace) -> int | None:
    """Launch one process per rank if args.gpus is above 1, wait for the processes, and return the exit code.

    Return None if this process must run the command itself: it is the only process, or a launcher has started it as a
    rank. If args.device or args.dequantize is None, set it to the default for this machine.
    Raise ValueError if --gpus contradicts --device or the launcher, if the machine has fewer GPUs than ranks, or if the
    ranks cannot share or hold the model. These checks do not read the weights.
    """
    started = started_ranks()
    if started is not None and args.gpus not in (None, started):
        raise ValueError(f"--gpus: must be the {started} ranks that were started, got {args.gpus}")
    gpus = started or args.gpus or 1
    if gpus > 1 and args.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: must be cpu or cuda, of which each rank takes its own GPU, got {args.device}")
    device = check_device(args.device)
    on_gpu = device.type == "cuda"
    if gpus > 1 and not on_gpu and args.device is None:  # the model may be too large for this machine's memory
        raise ValueError(f"--gpus: got {gpus}, but torch sees no CUDA GPU; for processes of a CPU give --device cpu")
    if on_gpu and started is None and gpus > torch.cuda.device_count():
        raise ValueError(f"--gpus: must be at most the {torch.cuda.device_count()} that torch sees, got {gpus}")

    args.device = str(device)
    if args.dequantize is None:
        args.dequantize = not on_gpu
    if gpus > 1 or on_gpu:
        found = plan_of(*stored_model(args), gpus, drafter=args.draft > 0)
        if on_gpu:
            check_fits(found, torch.cuda.get_device_properties(device).total_memory, args.cache_tokens or 1)
    if gpus == 1 or started is not None:
        return None
    told = (lambda problem, code: say_json("error", error=problem, exit_code=code)) if args.json else None
    return launch([sys.executable, "-m", "dsa_layers", *args.argv], gpus, told)


def join_ranks(args: argparse.Namespace) -> Ranks | None:
    """Join the group of ranks and return its `Ranks`, or return None if there is only one process. Set args.device to
    this rank's device. On ranks other than 0, discard the standard output, warnings and log messages below ERROR."""
    if started_ranks() in (None, 1):
        return None
    ranks, device = join(args.device)
    args.device = str(device)
    if ranks.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        logging.getLogger("dsa_layers").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    return ranks


def read_files(args: argparse.Namespace) -> tuple[Path, ModelConfig, Tokenizer]:
    """Return the checkpoint's directory, configuration and tokenizer. Call this before the weights are loaded, to
    report wrong files early. Raise ValueError, which names the file, if a file cannot be used."""
    directory = checkpoint_directory(args.checkpoint)
    return directory, read_config(directory), Tokenizer(directory)


def load(args: argparse.Namespace, directory: Path, ranks: Ranks | None = None) -> Model:
    """Load the model and, if args.draft is above 0, the drafter. With `ranks`, load only this rank's part. Call
    `start_ranks` first: it sets args.device and args.dequantize."""
    if args.checkpoint == SHIPPED_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the shipped model is too small to gain from several threads
    return load_model(
        directory,
        device=args.device,
        progress=sys.stderr.isatty(),
        mesh=ranks,
        drafter=args.draft > 0,
        **precision_options(args),
    )


def place(args: argparse.Namespace) -> dict[str, Any]:
    """Return fields for JSON events: the device and backend of the loaded model, and whether it is dequantised."""
    backend = backends.backend() if args.device.startswith("cuda") else "reference"
    return {"device": args.device, "backend": backend, "dequantized": args.dequantize}


def precision_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `load_model` that determine the precision."""
    return {
        "dtype": args.dtype and getattr(torch, args.dtype),
        "dequantize": bool(args.dequantize),
        "kv_cache": args.kv_cache,
        "widen_experts": args.widen_experts,
    }


def stored_model(args: argparse.Namespace) -> tuple[ModelConfig, Precision]:
    """Return the checkpoint's configuration and precision."""
    directory = checkpoint_directory(args.checkpoint, weights=False)
    # `precision_of` uses the files' headers. Ignore errors, because a hub checkpoint's weights may not be downloaded
    # yet.
    try:
        files = Checkpoint(directory)
    except CheckpointError:
        files = None
    config = read_config(directory)
    return config, precision_of(config, files, **precision_options(args))


def plan_of(config: ModelConfig, precision: Precision, gpus: int, *, drafter: bool) -> GpuPlan:
    """Return the plan for `gpus` GPUs. If they cannot share the model evenly, raise a ValueError that lists the
    accepted numbers of GPUs."""
    try:
        return gpu_plan.plan(config, precision, gpus, drafter=drafter)
    except DoesNotDivide as error:
        found = plans(config, precision, MOST_GPUS, drafter=drafter)
        accepted = [str(n) for n, plan in found.items() if isinstance(plan, GpuPlan)]
        raise ValueError(f"{error}; accepted up to {MOST_GPUS}: {', '.join(accepted)}") from None


def plan(args: argparse.Namespace) -> int:
    memory = args.memory
    if memory is None:
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * 10**9
    config, precision = stored_model(args)
    found = plans(config, precision, MOST_GPUS, drafter=args.draft > 0)
    if args.gpus:
        found = {args.gpus: plan_of(config, precision, args.gpus, drafter=args.draft > 0)}
    first = next(iter(found.values()))  # a GpuPlan, never an error: one GPU needs no split, and `plan_of` raises errors
    drafters = " with the drafter's" if args.draft else ""
    print(
        f"{args.checkpoint}: {first.whole / 1e9:.1f} GB of weights{drafters}, a cache of "
        f"{first.page / first.page_size / 1000:.1f} KB a token on every GPU; GPUs of {round(memory / 1e9, 1):g} GB"
    )
    print(f"{'GPUs':>4}  {'weights a GPU':>14}  tokens cached at most")
    some_fit = False
    for gpus, one in found.items():
        if isinstance(one, ValueError):
            if gpus.bit_count() == 1:  # report failures only for powers of two
                print(f"{gpus:>4}  {str(one).removeprefix(f'gpus: {gpus} ')}")
            continue
        tokens = one.tokens(memory)
        some_fit |= tokens > 0
        print(f"{gpus:>4}  {one.weights / 1e9:>11.1f} GB  {tokens - args.draft if tokens else 'does not fit'}")
    return 0 if some_fit else 1


def convert(args: argparse.Namespace) -> int:
    convert_checkpoint(args.checkpoint, args.directory, args.dtype, shard_bytes=args.shard_gb, device=args.device)
    size = sum(path.stat().st_size for path in args.directory.glob("*.safetensors"))
    print(f"wrote {args.directory}: {size / 1e9:.2f} GB of weights")
    return 0


def tiny(args: argparse.Namespace) -> int:
    write_tiny_checkpoint(args.directory, model=args.model, seed=args.seed)
    print(f"wrote {args.directory}")
    return 0


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
