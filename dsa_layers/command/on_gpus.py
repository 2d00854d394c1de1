"""The option that splits a model over several GPUs: this process starts one for each, or is one of them."""

import argparse
import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from dsa_layers import options
from dsa_layers.command.model_options import chosen_device
from dsa_layers.command.prompt_sources import for_other_processes
from dsa_layers.command.streams import say_json
from dsa_layers.parallel.environment import started_ranks

if TYPE_CHECKING:
    from dsa_layers.families.model import ModelConfig
    from dsa_layers.families.precision import Precision
    from dsa_layers.io.gpu_plan import GpuPlan
    from dsa_layers.parallel.ranks import Ranks

Value = TypeVar("Value")
MOST_GPUS = 16  # of numbers that are listed


def add_gpus_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpus",
        type=options.positive,
        metavar="N",
        help="split the model over so many GPUs of this machine, a process each, or with --device cpu over so many "
        "processes; torchrun may start them too (default: 1)",
    )


def starts_ranks(args: argparse.Namespace) -> bool:
    """Whether this process is to start a rank for each GPU. ValueError where it is a rank of another number of them."""
    started = started_ranks()
    if started is None:
        return (args.gpus or 1) > 1
    if args.gpus not in (None, started):
        raise ValueError(f"--gpus: must be the {started} ranks that were started, got {args.gpus}")
    return False


def start_ranks(args: argparse.Namespace) -> int:
    """Runs this command as that many ranks; the exit code. ValueError where there are fewer GPUs, or none and --device
    does not say cpu, and where they cannot hold the model, or it does not come apart into so many parts, before
    anything of it is read, and for prompts as `read_prompts` does."""
    import torch

    from dsa_layers.parallel.launch import launch

    if args.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: must be cpu or cuda, of which each rank takes its own GPU, got {args.device}")
    if _on_gpu(args):
        there = torch.cuda.device_count()
        if there < args.gpus:
            raise ValueError(f"--gpus: must be at most the {there} that torch sees, got {args.gpus}")
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(args.gpus))
    else:
        memory = None
    _check_parts(args, args.gpus, memory)
    reads_prompts = hasattr(args, "prompts")
    with for_other_processes(args.argv, args.prompts) if reads_prompts else contextlib.nullcontext(args.argv) as argv:
        command = [sys.executable, "-m", "dsa_layers.command", *argv]
        return launch(command, args.gpus, _error_event if args.json else None)


def _error_event(problem: str, code: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        say_json("error", error=problem, exit_code=code)


def check_memory(args: argparse.Namespace, ranks: "Ranks | None") -> None:
    """ValueError where this process's GPU cannot hold its part of the model, before anything of it is read: of ranks
    that torchrun has started, and of a single GPU."""
    import torch

    device = torch.device(chosen_device(args))
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        _check_parts(args, 1 if ranks is None else ranks.size, memory)


def _check_parts(args: argparse.Namespace, gpus: int, memory: int | None) -> None:
    """ValueError where the model does not come apart into so many parts, or a GPU of so much memory cannot hold one."""
    import torch

    from dsa_layers.errors import CheckpointError
    from dsa_layers.families.config import read_config
    from dsa_layers.io.directory import Checkpoint
    from dsa_layers.io.gpu_plan import check_fits, precision_of
    from dsa_layers.io.hub import checkpoint_directory

    directory = checkpoint_directory(args.checkpoint, weights=False)
    config = read_config(directory)
    dequantize = memory is None if args.dequantize is None else args.dequantize
    options = {"dequantize": dequantize, "kv_cache": args.kv_cache, "widen_experts": args.widen_experts}
    # The files say how experts are stored; the earliest config.json files do not. A hub id's files may still have to be
    # downloaded, and loading says what is wrong with others.
    try:
        files = Checkpoint(directory)
    except CheckpointError:
        files = None
    precision = precision_of(config, files, dtype=args.dtype and getattr(torch, args.dtype), **options)
    found = plan_of(config, precision, gpus, drafter=bool(args.draft))
    if memory is not None:
        with errors_of_options():
            check_fits(found, memory, args.cache_tokens or 1)


def plan_of(config: "ModelConfig", precision: "Precision", gpus: int, *, drafter: bool) -> "GpuPlan":
    """Return `plan` of so many GPUs. Raise ValueError, which names the numbers that share the model evenly."""
    from dsa_layers.engine.cuts import DoesNotDivide
    from dsa_layers.io.gpu_plan import plan, plans

    with errors_of_options():
        try:
            return plan(config, precision, gpus, drafter=drafter)
        except DoesNotDivide as error:
            every = plans(config, precision, MOST_GPUS, drafter=drafter).items()
            accepted = [str(n) for n, one in every if not isinstance(one, DoesNotDivide)]
            raise ValueError(f"{error}; accepted up to {MOST_GPUS}: {', '.join(accepted)}") from None


@contextlib.contextmanager
def errors_of_options() -> Iterator[None]:
    """The library's errors about the number of GPUs and about the drafter, by the options' names."""
    try:
        yield
    except ValueError as error:
        problem = re.sub(r"^gpus: ", "--gpus: ", re.sub(r"^drafter: ", "--draft: ", str(error)))
        if problem == str(error):
            raise
        raise ValueError(problem) from None


def join_ranks(args: argparse.Namespace) -> "Ranks | None":
    """This process's rank, None where it is alone; args.device becomes its own. All ranks but the first are silent."""
    if started_ranks() in (None, 1):
        return None
    from dsa_layers.parallel.process_group import join

    if args.device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device: must be cpu or cuda, of which each rank takes its own GPU, got {args.device}")
    with errors_of_options():
        ranks, device = join("cuda" if _on_gpu(args) else "cpu")
    args.device = str(device)
    if device.type == "cpu" and args.threads is None:
        args.threads = max(1, (os.cpu_count() or 1) // ranks.size)
    if ranks.rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        logging.getLogger("dsa_layers").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    return ranks


def agreed(ranks: "Ranks | None", make: Callable[[], Value]) -> Value:
    """What the first rank makes: there is one standard input."""
    if ranks is None:
        return make()
    from dsa_layers.parallel.process_group import agreed

    return agreed(ranks, make)


def _on_gpu(args: argparse.Namespace) -> bool:
    """Return whether each rank has a GPU. Raise ValueError without a GPU unless --device is cpu: a model that needs
    several GPUs would be dequantised into the machine's memory."""
    import torch

    if args.device is None and not torch.cuda.is_available():
        got = args.gpus or started_ranks()
        raise ValueError(f"--gpus: got {got}, but torch sees no CUDA GPU; for processes of a CPU give --device cpu")
    return args.device != "cpu"
