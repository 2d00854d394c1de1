"""The options that say which model a command runs, on what and how precisely, and the model that they give."""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_layers import SHIPPED_MODEL, options
from dsa_layers.cache.drafts import DRAFTS
from dsa_layers.command.streams import say

if TYPE_CHECKING:
    from dsa_layers.families.model import Model, ModelConfig
    from dsa_layers.io.tokenizer import Tokenizer
    from dsa_layers.parallel.ranks import Ranks


# Of commands that read no weights.
CONFIG_HELP = (
    "a checkpoint's directory, its hub id, or a config.json by itself (default: the small model that comes with dsa)"
)


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint's configuration and tokenizer, which are read and checked before the weights."""

    directory: Path
    config: "ModelConfig"
    tokenizer: "Tokenizer"


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint's model and tokenizer, and on what it runs. backend: "cute" or "reference"."""

    model: "Model"
    tokenizer: "Tokenizer"
    checkpoint: Path
    device: str
    backend: str
    dequantized: bool

    def facts(self) -> dict[str, object]:
        """What events in JSON say of it."""
        names = ("device", "backend", "dequantized")
        return {"checkpoint": str(self.checkpoint)} | {name: getattr(self, name) for name in names}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=options.path,
        nargs="?",
        default=SHIPPED_MODEL,
        help="directory with config.json, safetensors and tokenizer.json, or a hub id, OWNER/NAME (default: the small "
        "model of Python source that comes with dsa)",
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is a GPU, else cpu)")
    add_precision_options(parser, dequantized="yes on a CPU, no on a GPU")
    parser.add_argument(
        "--prefill-chunk",
        type=options.positive,
        default=2048,
        metavar="N",
        help="prompt tokens a pass (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=options.of_cpus,
        metavar="N",
        help=f"of the CPU, at most {options.OF_A_CPU} for each that the machine has (default: PyTorch's choice; 1 for "
        "the model that comes with dsa, too small for several)",
    )


def add_precision_options(parser: argparse.ArgumentParser, *, dequantized: str) -> None:
    """dequantized: the default of that option, in words."""
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of activations, and of weights that are not quantised (default: the checkpoint's)",
    )
    parser.add_argument(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="FP8 and FP4 weights become --dtype weights, and nothing else is quantised either: on a CPU that is less "
        f"work (default: {dequantized})",
    )
    parser.add_argument(
        "--kv-cache",
        choices=("fp8", "model"),
        help="latents in the cache: FP8, or in --dtype (default: fp8 for an FP8 checkpoint that is not dequantised, "
        "else model)",
    )
    parser.add_argument(
        "--widen-experts",
        action="store_true",
        help="experts in FP4 become FP8 when they are loaded, which takes twice the memory and gives the same results "
        "(default: off, they stay FP4)",
    )


def add_draft_option(parser: argparse.ArgumentParser, does: str) -> None:
    """does: what the option does, in words."""
    parser.add_argument(
        "--draft", type=int, choices=range(DRAFTS + 1), default=0, metavar="K", help=f"{does} (default: %(default)s)"
    )


def chosen_device(args: argparse.Namespace) -> str:
    """--device, or what there is. ValueError for one that is not there."""
    from dsa_layers.families.precision import check_device

    try:
        return str(check_device(args.device))
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def say_that_drafts_exist(args: argparse.Namespace, config: "ModelConfig") -> None:
    """On a terminal, where --draft would load a drafter. The shipped model's first output is its text."""
    asks = args.draft == 0 and args.checkpoint != SHIPPED_MODEL
    if asks and config.num_nextn_predict_layers and sys.stderr is not None and sys.stderr.isatty():
        say("Tip: --draft 1 drafts tokens with the checkpoint's multi-token-prediction layer, which is not loaded now.")


def read_files(args: argparse.Namespace) -> CheckpointFiles:
    """Raise ValueError, which names the file, for what cannot be read."""
    from dsa_layers.families.config import read_config
    from dsa_layers.io.hub import checkpoint_directory
    from dsa_layers.io.tokenizer import Tokenizer

    checkpoint = checkpoint_directory(args.checkpoint)
    if checkpoint.is_file():
        raise ValueError(f"{args.checkpoint}: is a file; a checkpoint is the directory of config.json and safetensors")
    if not checkpoint.is_dir():
        raise ValueError(f"{args.checkpoint}: no such directory; a checkpoint holds config.json and safetensors")
    if not any(checkpoint.iterdir()):
        raise ValueError(f"{args.checkpoint}: is empty; a checkpoint holds config.json, tokenizer.json and safetensors")
    return CheckpointFiles(checkpoint, read_config(checkpoint), Tokenizer(checkpoint))


def load(
    args: argparse.Namespace, files: CheckpointFiles, ranks: "Ranks | None" = None, *, drafter: bool = False
) -> LoadedModel:
    """ranks: over which the model is split; drafter: whether the model gets the checkpoint's. Raises ValueError, which
    names the option or the file, for what cannot be loaded."""
    import torch

    from dsa_layers.io.loading import load_model

    device = chosen_device(args)
    on_gpu = torch.device(device).type == "cuda"
    backend = _backend(device, on_gpu)
    threads = args.threads
    if threads is None and args.checkpoint == SHIPPED_MODEL and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    dequantize = not on_gpu if args.dequantize is None else args.dequantize
    # Weights that fit a GPU may be too many for this machine once they are dequantised; the shipped model's are few.
    by_default = args.device is None and args.dequantize is None and args.checkpoint != SHIPPED_MODEL
    if by_default and dequantize and files.config.quantization is not None:
        say("No GPU: the model runs on the CPU, and its quantised weights are dequantised, which takes more memory.")
    model = load_model(
        files.directory,
        device=device,
        dtype=args.dtype and getattr(torch, args.dtype),
        dequantize=dequantize,
        kv_cache=args.kv_cache,
        widen_experts=args.widen_experts,
        progress=sys.stderr is not None and sys.stderr.isatty(),
        mesh=ranks,
        drafter=drafter,
    )
    return LoadedModel(model, files.tokenizer, files.directory, device, backend, dequantize)


def _backend(device: str, on_gpu: bool) -> str:
    """That of the ops there. ValueError for a DSA_BACKEND that they would refuse, once output has begun."""
    from dsa.runtime import backends

    backend = backends.backend()
    if backend == os.environ.get("DSA_BACKEND") == "cute":
        reason = backends.why_no_kernels() if on_gpu else f"the model is on {device}"
        if reason is not None:
            raise ValueError(f"DSA_BACKEND: must be reference where kernels cannot run, got 'cute', but {reason}")
    return backend if on_gpu else "reference"
