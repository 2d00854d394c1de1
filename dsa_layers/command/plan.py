"""`dsa plan`: what each of several GPUs would hold of a model, and what context is left."""

import argparse

import torch

from dsa_layers.command.model import plan_of, stored_model
from dsa_layers.command.parser import MOST_GPUS
from dsa_layers.io.gpu_plan import plans


def run(args: argparse.Namespace) -> int:
    memory = args.memory
    if memory is None:
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80 * 10**9
    config, precision = stored_model(args, dequantize=False)
    if args.gpus:
        found = {args.gpus: plan_of(config, precision, args.gpus, drafter=bool(args.draft))}
    else:
        found = plans(config, precision, MOST_GPUS, drafter=bool(args.draft))
    first = next(iter(found.values()))  # one GPU always holds a whole model
    drafters = " with the drafter's" if args.draft else ""
    print(
        f"{args.checkpoint}: {first.whole / 1e9:.1f} GB of weights{drafters}, a cache of "
        f"{first.page / first.page_size / 1000:.1f} KB a token on every GPU; GPUs of {round(memory / 1e9, 1):g} GB"
    )
    print(f"{'GPUs':>4}  {'weights a GPU':>14}  tokens cached at most")
    some_fit = False
    for gpus, plan in found.items():
        if isinstance(plan, ValueError):
            if gpus.bit_count() == 1:  # nobody expects others
                print(f"{gpus:>4}  {str(plan).removeprefix(f'gpus: {gpus} ')}")
            continue
        tokens = plan.tokens(memory)
        some_fit |= tokens > 0
        print(f"{gpus:>4}  {plan.weights / 1e9:>11.1f} GB  {tokens - args.draft if tokens else 'does not fit'}")
    return 0 if some_fit else 1
