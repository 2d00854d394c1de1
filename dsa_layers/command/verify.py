"""`dsa verify`: test a checkpoint's weights on this machine, and write a report to send to the project."""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import dsa
from dsa_layers import Generator, SamplingParams, options
from dsa_layers.command.check import PACKAGES, versions
from dsa_layers.command.generate import read_text
from dsa_layers.command.messages import say
from dsa_layers.command.model import LoadedModel, join_ranks, load, read_files, start_ranks, stored_model
from dsa_layers.evaluation.held_out_loss import Difference, held_out_loss, logits_of
from dsa_layers.generation.requests import Throughput
from dsa_layers.io.directory import Checkpoint, checkpoint_directory
from dsa_layers.io.loading import unfilled_model
from dsa_layers.models.protocols import Model

_PROMPTS = (
    "The three primary colours are",
    "def fibonacci(n):\n",
    "Q: What is 17 times 23?\nA:",
    "\u5317\u4eac\u662f",
)
_NEW_TOKENS = 32
_TEXT_TOKENS = 4096
_REFERENCE_TOKENS = 256  # of the text, for the slow references
_PROMPT_LENGTHS = 1024, 8192
_SEQUENCES = 1, 8
_STEPS = 64
_BEGIN = 128  # tokens of each sequence before the steps
_PEERS = "nvidia-cudnn-frontend", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "vllm"
_NUMBERS = 2**26  # that are converted to fp32 at a time


def run(args: argparse.Namespace) -> int:
    options.check_output("--report", args.report)
    text = read_text(f"--text {args.text}", args.text.read_bytes())
    # Load the drafter if there is one: its tensors are checked too.
    args.draft, args.cache_tokens = 1, max(_PROMPT_LENGTHS)
    try:
        model = unfilled_model(*stored_model(args, dequantize=False), drafter=True)
        names = Checkpoint(checkpoint_directory(args.checkpoint)).tensors
        args.draft = int(any(model.name_of(name).startswith("drafter.") for name in names))
    except ValueError:  # loading says what is wrong with a checkpoint
        args.draft = 0
    exit_code = start_ranks(args)
    if exit_code is not None:
        return exit_code
    ranks = join_ranks(args)
    files = read_files(args)
    tokens = files.tokenizer.encode(text)
    if len(tokens) < 2:
        raise ValueError(f"--text: must have at least 2 tokens, got {args.text} with {len(tokens)}")
    context = files.config.max_position_embeddings
    lengths = [n for n in _PROMPT_LENGTHS if n < min(context, len(tokens) * 8)] or [min(context // 2, len(tokens))]
    repeated = (tokens * -(-max(lengths) // len(tokens)))[: max(lengths)]
    tokens = tokens[: min(_TEXT_TOKENS, context - 1) + 1]

    began = time.perf_counter()
    loaded = load(args, files, ranks)
    model, report = loaded.model, {}

    def add(part: str, found: dict[str, Any]) -> None:
        report[part] = found
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in found.items()}
        print(f"{part}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)

    device = torch.cuda.get_device_name(loaded.device) if loaded.device.startswith("cuda") else "CPU"
    sizes = [path.stat().st_size for path in files.directory.glob("*.safetensors")]
    add("machine", {"device": f"{1 if ranks is None else ranks.size} x {device}", "backend": loaded.backend})
    report["versions"] = {package: found for package, found in versions((*PACKAGES, *_PEERS)).items() if found}
    add(
        "checkpoint",
        {
            "model_type": files.config.model_type,
            "layers": files.config.num_hidden_layers,
            "files": len(sizes),
            "bytes": sum(sizes),
            "dequantized": loaded.dequantized,
            "drafter": model.drafter is not None,
            "load_seconds": time.perf_counter() - began,
        },
    )
    report["config_sha256"] = hashlib.sha256((files.directory / "config.json").read_bytes()).hexdigest()
    add("tensors", tensor_check(model))

    room = max(lengths) + max(_SEQUENCES) * (_BEGIN + _STEPS + model.page_size)
    generator = Generator(model, files.tokenizer, cache_tokens=room)
    runs = [generator.generate(_PROMPTS, SamplingParams(max_tokens=_NEW_TOKENS)) for _ in range(2)]
    report["tokens_of_prompts"], again = ([completion.tokens for completion in completions] for completions in runs)
    same_twice = report["tokens_of_prompts"] == again
    add("generation", {"same_twice": same_twice, "texts": [completion.text for completion in runs[0]]})
    add("text", asdict(held_out_loss(model, [tokens], chunk=args.prefill_chunk)))
    for name, difference in _differences(loaded, tokens[: _REFERENCE_TOKENS + 1], args.prefill_chunk):
        add(name, difference)

    say("Measuring speed, each figure twice. This is the longest part, and takes minutes on a CPU ...")
    prompts = {f"{n} tokens": _throughput(generator, [repeated[:n]], 1) for n in lengths}
    add("prompts, tokens/s", {name: done.prefill_tokens / done.prefill_seconds for name, done in prompts.items()})
    steps = {f"{n} sequences": _throughput(generator, [repeated[:_BEGIN]] * n, _STEPS) for n in _SEQUENCES}
    add("steps, tokens/s", {name: done.decode_tokens / (done.decode_seconds or 1) for name, done in steps.items()})

    if ranks is None or ranks.rank == 0:
        args.report.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        say(f"{args.report} is written. If these are published weights, please attach it to an issue of the project.")
    return 0 if same_twice and not report["tensors"]["not_finite"] else 1


def tensor_check(model: Model) -> dict[str, Any]:
    """Return how many tensors and numbers the parameters and buffers of all ranks have, and the names of those with
    NaN or infinity."""
    tensors = model.state_dict()
    bad = [
        name
        for name, x in tensors.items()
        if x.is_floating_point() and not all(part.float().isfinite().all() for part in x.flatten().split(_NUMBERS))
    ]
    of_ranks = [(len(tensors), sum(x.numel() for x in tensors.values()), bad)]
    if dist.is_initialized():
        of_ranks *= dist.get_world_size()
        dist.all_gather_object(of_ranks, of_ranks[0])
    counts, numbers, names = zip(*of_ranks)
    return {
        "tensors": sum(counts),
        "numbers": sum(numbers),
        "not_finite": sorted({name for bad in names for name in bad}),
    }


def _throughput(generator: Generator, prompts: list[list[int]], max_tokens: int) -> Throughput:
    """Return the throughput of the second of two runs: the first one loads kernels and captures graphs."""
    for _ in range(2):
        generator.generate(prompts, SamplingParams(max_tokens=max_tokens))
    return generator.throughput


def _differences(loaded: LoadedModel, tokens: list[int], chunk: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, difference from the references) on the text's first tokens, with kernels."""
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
        except Exception as error:  # of libraries that refuse these shapes
            yield name, {"failed": f"{type(error).__name__}: {error}"[:200]}
            return
    yield name, asdict(Difference.between(theirs, expected, targets))
