"""`dsa verify`: test a checkpoint's weights on this machine, and write a report to send to the project."""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsa_layers import options
from dsa_layers.command import on_gpus
from dsa_layers.command.compare import HELD_OUT_TEXT
from dsa_layers.command.model_options import CheckpointFiles, LoadedModel, add_model_options, load, read_files
from dsa_layers.command.prompt_sources import read_text_file
from dsa_layers.command.streams import say
from dsa_layers.output_files import naming
from dsa_layers.untrusted_files import read_json_object

_PROMPTS = (
    "The three primary colours are",
    "def fibonacci(n):\n",
    "Q: What is 17 times 23?\nA:",
    "\u5317\u4eac\u662f",
)
_NEW_TOKENS = 32
_TEXT_TOKENS = 4096
_SLICE = 256  # tokens that the references run
_PROMPT_LENGTHS = 1024, 8192
_SEQUENCES = 1, 8
_STEPS = 64
_MAX_REPORT = 2**24  # bytes
_PEERS = "nvidia-cudnn-frontend", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "vllm"

_REPORT = """\
The report, one JSON object, holds what is printed, the tokens of the fixed prompts, the configuration's digest and the
versions of the libraries. It has no path, no user's name and nothing of --text but its loss.
Exit codes: 0; 1 where a tensor has NaN or infinity or a second run gave other tokens; 2 for a wrong call or input."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "verify",
        help="test a checkpoint's weights on this machine and write a report to send to the project",
        description="Load a checkpoint, look for NaN in every tensor, generate from fixed prompts, measure the loss on "
        "a text by the kernels, by other libraries' kernels where these are installed, and on a slice by the PyTorch "
        "references, and time prompts and steps.",
        epilog=_REPORT,
    )
    # What the options of several GPUs ask for besides.
    parser.set_defaults(run=run, draft=0, cache_tokens=max(_PROMPT_LENGTHS), json=False)
    add_model_options(parser)
    on_gpus.add_gpus_option(parser)
    parser.add_argument(
        "--text",
        type=options.path,
        metavar="FILE",
        default=HELD_OUT_TEXT,
        help="UTF-8 (default: a module of Python's standard library)",
    )
    parser.add_argument(
        "--report",
        type=options.path,
        metavar="FILE",
        default=Path("dsa-verify.json"),
        help="where the report is written: a new file, or an earlier report, which is replaced (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    options.check_output("--report", args.report)
    if args.report.exists() and not _may_be_replaced(args.report):
        raise ValueError(f"--report: must be a new or empty file, or an earlier report, got {args.report}")
    text = read_text_file("--text", args.text)
    if on_gpus.starts_ranks(args):
        return on_gpus.start_ranks(args)
    ranks = on_gpus.join_ranks(args)
    args.draft = int(_has_drafter(args))
    on_gpus.check_memory(args, ranks)
    files = read_files(args)
    tokens = _tokens_of(args.text, text, files)
    began = time.perf_counter()
    with on_gpus.errors_of_options():
        loaded = load(args, files, ranks, drafter=args.draft > 0)
    seconds = time.perf_counter() - began
    report = _Report()
    report.add("machine", _machine(loaded, 1 if ranks is None else ranks.size))
    report.add("checkpoint", _checkpoint(loaded) | {"load_seconds": round(seconds, 1)})
    sound = _verify(loaded, tokens, args.prefill_chunk, report)
    if ranks is None or ranks.rank == 0:
        with naming(args.report):
            args.report.write_text(report.text(), encoding="utf-8")
        say(f"{args.report} is written. If these are published weights, please attach it to an issue of the project.")
    return 0 if sound else 1


def _may_be_replaced(path: Path) -> bool:
    try:
        if path.is_file() and path.stat().st_size == 0:
            return True
        return {"machine", "checkpoint"} <= read_json_object(path, ValueError, _MAX_REPORT).keys()
    except (OSError, ValueError):
        return False


class _Report:
    """Parts are printed as they come."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def text(self) -> str:
        """JSON, in which a number that is not finite is a string: "nan"."""
        return json.dumps(_finite(self.parts), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def add(self, name: str, found: dict[str, Any]) -> None:
        self.parts[name] = found
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in found.items()}
        hidden = ("tokens_of_prompts", "versions", "config_sha256")
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items() if key not in hidden)}", flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _tokens_of(path: Path, text: str, files: CheckpointFiles) -> list[int]:
    tokens = files.tokenizer.encode(text)
    if len(tokens) < 2:
        raise ValueError(f"--text: must have at least 2 tokens, got {path} with {len(tokens)}")
    return tokens[: min(_TEXT_TOKENS, files.config.max_position_embeddings - 1) + 1]


def _verify(loaded: LoadedModel, tokens: list[int], chunk: int, report: _Report) -> bool:
    from dsa_layers.evaluation.held_out_loss import held_out_loss
    from dsa_layers.evaluation.verification import Speed, TensorCheck

    model = loaded.model
    tensors = TensorCheck.of(model)
    report.add("tensors", asdict(tensors))

    generated = _generated(loaded)
    report.add("generation", generated)

    report.add("text", asdict(held_out_loss(model, [tokens], chunk=chunk)))

    for name, difference in _differences(loaded, tokens[: _SLICE + 1], chunk):
        report.add(name, difference)

    context = model.config.max_position_embeddings
    prompts = [n for n in _PROMPT_LENGTHS if n < min(context, len(tokens) * 8)] or [min(context // 2, len(tokens))]
    many = tokens * (max(prompts) // len(tokens) + 1)
    say("Measuring speed, each figure twice. This is the longest part, and takes minutes on a CPU ...")
    speed = Speed.of(model, many, prompts, _SEQUENCES, _STEPS)
    report.add("prompts, tokens/s", {f"{n} tokens": rate for n, rate in speed.prompts.items()})
    report.add("steps, tokens/s", {f"{n} sequences": rate for n, rate in speed.steps.items()})
    return not tensors.not_finite and generated["same_twice"]


def _has_drafter(args: argparse.Namespace) -> bool:
    """Whether the checkpoint holds a multi-token-prediction layer that can be loaded: its tensors are checked too."""
    from dsa_layers.families.config import read_config
    from dsa_layers.families.precision import Precision
    from dsa_layers.io.directory import Checkpoint
    from dsa_layers.io.hub import checkpoint_directory
    from dsa_layers.io.loading import unfilled_model

    try:
        directory = checkpoint_directory(args.checkpoint)
        config = read_config(directory)
        model = unfilled_model(config, Precision.of(config), drafter=True)
        return any(model.name_of(name).startswith("drafter.") for name in Checkpoint(directory).tensors)
    except ValueError:  # loading says what is wrong with a checkpoint
        return False


def _machine(loaded: LoadedModel, gpus: int) -> dict[str, Any]:
    import torch

    from dsa_layers.command.health import versions

    on_gpu = loaded.device.startswith("cuda")
    name = torch.cuda.get_device_name(loaded.device) if on_gpu else "CPU"
    installed = {package: version for package, version in (versions() | versions(_PEERS)).items() if version}
    return {"device": f"{gpus} x {name}", "backend": loaded.backend, "versions": installed}


def _checkpoint(loaded: LoadedModel) -> dict[str, Any]:
    config, files = loaded.model.config, list(loaded.checkpoint.glob("*.safetensors"))
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "config_sha256": hashlib.sha256((loaded.checkpoint / "config.json").read_bytes()).hexdigest(),
        "dequantized": loaded.dequantized,
        "drafter": loaded.model.drafter is not None,
    }


def _generated(loaded: LoadedModel) -> dict[str, Any]:
    from dsa_layers.generation.generator import Generator
    from dsa_layers.generation.sampling import SamplingParams

    generator = Generator(loaded.model, loaded.tokenizer, cache_tokens=4096)
    runs = [generator.generate(list(_PROMPTS), SamplingParams(max_tokens=_NEW_TOKENS)) for _ in range(2)]
    tokens = [[completion.tokens for completion in completions] for completions in runs]
    return {
        "prompts": len(_PROMPTS),
        "same_twice": tokens[0] == tokens[1],
        "texts": [completion.text for completion in runs[0]],
        "tokens_of_prompts": tokens[0],
    }


def _differences(loaded: LoadedModel, tokens: list[int], chunk: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, difference from the references) on the text's first tokens."""
    import dsa
    from dsa_layers.evaluation.verification import Difference, logits_of

    if loaded.backend != "cute":
        return
    ours, targets = logits_of(loaded.model, tokens, chunk)
    with dsa.use_backend("reference"):
        expected, _ = logits_of(loaded.model, tokens, chunk)
    yield "kernels against references", asdict(Difference.between(ours, expected, targets))

    from dsa_bench.e2e.peers import peer_kernels

    with peer_kernels() as replaced:
        if not replaced.ops:
            return
        name = f"{', '.join(replaced.libraries)} against references"
        try:
            theirs, _ = logits_of(loaded.model, tokens, chunk)
        except Exception as error:  # whatever a library says of shapes that it does not take
            yield name, {"failed": next(iter(str(error).splitlines()), type(error).__name__)[:200]}
            return
    yield name, asdict(Difference.between(theirs, expected, targets))
