"""Load the model that the options ask for, on one GPU or as one of several ranks."""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dsa.runtime import backends
from dsa_layers import SHIPPED_MODEL, Precision, Ranks, Tokenizer, load_model, read_config
from dsa_layers.command.messages import say, say_json
from dsa_layers.command.parser import MOST_GPUS
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.engine.split import DoesNotDivide
from dsa_layers.errors import CheckpointError
from dsa_layers.io.directory import Checkpoint, checkpoint_directory
from dsa_layers.io.gpu_plan import GpuPlan, check_fits, plans, precision_of
from dsa_layers.models.precision import check_device
from dsa_layers.models.protocols import Model
from dsa_layers.parallel.launch import launch, started_ranks
from dsa_layers.parallel.process_group import join


class CheckpointFiles(NamedTuple):
    """A checkpoint's directory, and what is read and checked before its weights."""

    directory: Path
    config: ModelConfig
    tokenizer: Tokenizer


class LoadedModel(NamedTuple):
    """A model and what it runs on. backend: "cute" or "reference"."""

    model: Model
    device: str
    backend: str
    dequantized: bool


def precision_options(args: argparse.Namespace, *, dequantize: bool) -> dict[str, Any]:
    """Return the options of `load_model` about precision. dequantize: the default of --dequantize."""
    return {
        "dtype": args.dtype and getattr(torch, args.dtype),
        "dequantize": dequantize if args.dequantize is None else args.dequantize,
        "kv_cache": args.kv_cache,
        "widen_experts": args.widen_experts,
    }


def read_files(args: argparse.Namespace) -> CheckpointFiles:
    """Raise ValueError, which names the file, for what cannot be read."""
    checkpoint = checkpoint_directory(args.checkpoint)
    if not checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint}: no such directory; a checkpoint holds config.json and safetensors")
    return CheckpointFiles(checkpoint, read_config(checkpoint), Tokenizer(checkpoint))


def load(args: argparse.Namespace, files: CheckpointFiles, ranks: Ranks | None = None) -> LoadedModel:
    """Load the model, or with `ranks` this rank's part of it, and the drafter if --draft asks for one."""
    device = check_device(args.device)
    on_gpu = device.type == "cuda"
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    elif args.checkpoint == SHIPPED_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    asked = args.device is not None or args.dequantize is not None or args.checkpoint == SHIPPED_MODEL
    if not (on_gpu or asked) and files.config.quantization is not None:
        say("No GPU: the model runs on the CPU, and its quantised weights are dequantised, which takes more memory.")
    precision = precision_options(args, dequantize=not on_gpu)
    model = load_model(
        files.directory,
        device=device,
        progress=sys.stderr.isatty(),
        mesh=ranks,
        drafter=args.draft > 0,
        **precision,
    )
    return LoadedModel(model, str(device), backends.backend() if on_gpu else "reference", precision["dequantize"])


def start_ranks(args: argparse.Namespace) -> int | None:
    """Run this command as one rank per GPU and return the exit code. Return None if this process runs it itself: alone,
    or as a rank.

    Raise ValueError if there are fewer GPUs than that, or if they cannot hold the model. Its weights are not read.
    """
    started = started_ranks()
    if started is not None and args.gpus not in (None, started):
        raise ValueError(f"--gpus: must be the {started} ranks that were started, got {args.gpus}")
    gpus = started or args.gpus or 1
    if gpus > 1 and args.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: must be cpu or cuda, of which each rank takes its own GPU, got {args.device}")
    device, memory = check_device(args.device), None
    if device.type == "cuda":
        if started is None and gpus > torch.cuda.device_count():
            raise ValueError(f"--gpus: must be at most the {torch.cuda.device_count()} that torch sees, got {gpus}")
        memory = torch.cuda.get_device_properties(device).total_memory
    elif gpus > 1 and args.device is None:  # the model may be too large for this machine's memory
        raise ValueError(f"--gpus: got {gpus}, but torch sees no CUDA GPU; for processes of a CPU give --device cpu")
    if gpus > 1 or memory is not None:
        found = plan_of(*stored_model(args, dequantize=memory is None), gpus, drafter=bool(args.draft))
        if memory is not None:
            check_fits(found, memory, args.cache_tokens or 1)
    if gpus == 1 or started is not None:
        return None
    told = (lambda problem, code: say_json("error", error=problem, exit_code=code)) if args.json else None
    return launch([sys.executable, "-m", "dsa_layers", *args.argv], gpus, told)


def stored_model(args: argparse.Namespace, *, dequantize: bool) -> tuple[ModelConfig, Precision]:
    """Return the checkpoint's configuration and precision. dequantize: the default of --dequantize."""
    directory = checkpoint_directory(args.checkpoint, weights=False)
    config = read_config(directory)
    # The earliest checkpoints with FP4 experts say so in their files only. Files of the hub may not be here yet, and
    # loading says what is wrong with others.
    try:
        files = Checkpoint(directory)
    except CheckpointError:
        files = None
    return config, precision_of(config, files, **precision_options(args, dequantize=dequantize))


def plan_of(config: ModelConfig, precision: Precision, gpus: int, *, drafter: bool) -> GpuPlan:
    """Return the plan for so many GPUs. Raise ValueError, which names the accepted numbers, if they cannot share the
    model evenly."""
    found = plans(config, precision, max(gpus, MOST_GPUS), drafter=drafter)
    if isinstance(found[gpus], DoesNotDivide):
        accepted = [str(n) for n, plan in found.items() if isinstance(plan, GpuPlan)]
        raise ValueError(f"{found[gpus]}; accepted up to {MOST_GPUS}: {', '.join(accepted)}")
    return found[gpus]


def join_ranks(args: argparse.Namespace) -> Ranks | None:
    """Return this process's rank, None if it is alone. Set args.device to the rank's, and silence all ranks but the
    first."""
    if started_ranks() in (None, 1):
        return None
    ranks, device = join(args.device or "cuda")
    args.device = str(device)
    if device.type == "cpu" and args.threads is None:
        args.threads = max(1, (os.cpu_count() or 1) // ranks.size)
    if ranks.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        logging.getLogger("dsa_layers").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    return ranks
