"""`dsa plan`, `dsa convert` and `dsa tiny`: predict a checkpoint's memory, and write checkpoints."""

import argparse

import torch

from dsa_layers import convert_checkpoint, write_tiny_checkpoint
from dsa_layers.command.model import plan_of, stored_model
from dsa_layers.command.parser import MOST_GPUS
from dsa_layers.io.gpu_plan import plans


def plan(args: argparse.Namespace) -> int:
    memory = args.memory
    if memory is None:
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * 10**9
    config, precision = stored_model(args)
    found = plans(config, precision, MOST_GPUS, drafter=args.draft > 0)
    if args.gpus:
        found = {args.gpus: plan_of(config, precision, args.gpus, drafter=args.draft > 0)}
    first = next(iter(found.values()))  # a GpuPlan: a single GPU divides nothing, and `plan_of` raises any error
    drafters = " with the drafter's" if args.draft else ""
    print(
        f"{args.checkpoint}: {first.whole / 1e9:.1f} GB of weights{drafters}, a cache of "
        f"{first.page / first.page_size / 1000:.1f} KB a token on every GPU; GPUs of {round(memory / 1e9, 1):g} GB"
    )
    print(f"{'GPUs':>4}  {'weights a GPU':>14}  tokens cached at most")
    some_fit = False
    for gpus, one in found.items():
        if isinstance(one, ValueError):
            if gpus.bit_count() == 1:  # report failures only for powers of two, the usual numbers of GPUs
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
