"""`python -m dsa_bench.engines.answers vllm|sglang CHECKPOINT`: does an engine answer the same with dsa's plugin?

Per-token log-probabilities of held-out text are compared with the checkpoint's model in fp32, for the engine alone and
with the plugin, and the tokens that each generates greedily with each other. The same requests are sent in several
ways, which must not change an answer by more than rounding: one by one, together, again (from the prefix cache), in
chunks, and with a cache so small that the engine preempts requests.

Prints a line of JSON per way and side: `loss`, nats per token; `to_reference` and `to_alone`, the mean absolute
difference of log-probabilities to the model in fp32 and to the same side's answers one by one; `same_text`, the share
of requests whose generated tokens are those of the same side one by one. A last line per way has as `same_text` the
share whose tokens are equal with and without the plugin.

Where texts differ, `largest_gap` says whether rounding explains it. It is the largest gap in nats, over the requests,
between the log-probabilities of the two tokens at the first difference; a lower bound of it if the engine did not
report the other token's, as it does for the five most likely ones.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dsa_bench.e2e.held_out_text import held_out_sequences
from dsa_bench.engines.command import add_engine, check_engine, positive, print_rows
from dsa_bench.engines.turns import Side, started
from dsa_layers import Tokenizer, load_model
from dsa_layers.evaluation import predictions
from dsa_layers.models.family import read_config

# Of each request: `logprobs` of the prompt's tokens but the first, `tokens`, and for each of these `likely`, the most
# likely ones as [token, log-probability].
Answers = list[dict[str, Any]]
# {engine: {way: (engine options, send all at once, send twice so that the second time reads the cache)}}
WAYS: dict[str, dict[str, tuple[dict[str, Any], bool, bool]]] = {
    "vllm": {
        "one by one": ({"enable_prefix_caching": False}, False, False),
        "together": ({"enable_prefix_caching": False}, True, False),
        "again": ({}, True, True),
        "in chunks": ({"enable_prefix_caching": False, "max_num_batched_tokens": 640}, True, False),
        "preempted": ({"enable_prefix_caching": False, "num_gpu_blocks_override": 72}, True, False),
        "drafts": ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, True, False),
        "two GPUs": ({"tensor_parallel_size": 2}, True, False),
    },
    "sglang": {
        "one by one": ({"disable_radix_cache": True}, False, False),
        "together": ({"disable_radix_cache": True}, True, False),
        "again": ({}, True, True),
        "in chunks": ({"disable_radix_cache": True, "chunked_prefill_size": 640}, True, False),
        "preempted": ({"disable_radix_cache": True, "max_total_tokens": 4608}, True, False),
        "drafts": ({"speculative_algorithm": "EAGLE", "speculative_num_steps": 1}, True, False),
        "two GPUs": ({"tp_size": 2}, True, False),
    },
}
DEFAULT_WAYS = ("one by one", "together", "again", "in chunks", "preempted")
# Engine options for a checkpoint on disk, and the option that limits the context.
FROM_DISK: dict[str, tuple[dict[str, Any], str]] = {
    "vllm": ({"load_format": "auto"}, "max_model_len"),
    "sglang": (
        {
            "load_format": "auto",
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16],
            "cuda_graph_bs_prefill": [512, 2048, 8192],
        },
        "context_length",
    ),
}


def reference(checkpoint: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probabilities of the sequences' tokens but the first, by the model in fp32."""
    model = load_model(checkpoint, device="cpu", dtype=torch.float32, dequantize=True, progress=False)
    found: list[float] = []
    for logits, targets in predictions(model, sequences, 1 << 20):
        found += logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1).tolist()
    lengths = [len(tokens) - 1 for tokens in sequences]
    return [list(map(float, part)) for part in torch.tensor(found).split(lengths)]


def texts(answers: Answers, others: Answers) -> dict[str, float | None]:
    """`same_text` and `largest_gap`, which is None if all texts are equal."""
    gaps = []
    for answer, other in zip(answers, others, strict=True):
        places = zip(answer["tokens"], other["tokens"], answer["likely"])
        differs = next(((mine, its, dict(likely)) for mine, its, likely in places if mine != its), None)
        if differs is not None:
            mine, its, likely = differs
            gaps.append(likely[mine] - likely.get(its, min(likely.values())))
    return {"same_text": 1 - len(gaps) / len(answers), "largest_gap": max(gaps, default=None)}


def row(answers: Answers, expected: list[list[float]], alone: Answers) -> dict[str, float | None]:
    if not answers[0]["logprobs"]:
        return texts(answers, alone)
    every = torch.cat([torch.tensor(answer["logprobs"]) for answer in answers])
    first = torch.cat([torch.tensor(answer["logprobs"]) for answer in alone])
    return {
        "loss": -every.mean().item(),
        "to_reference": (every - torch.cat([*map(torch.tensor, expected)])).abs().mean().item(),
        "to_alone": (every - first).abs().mean().item(),
    } | texts(answers, alone)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.engines.answers", description=__doc__.splitlines()[0])
    add_engine(parser)
    parser.add_argument("checkpoint", type=Path, help="directory of a model that examples/train_indexer.py has trained")
    parser.add_argument("--ways", nargs="*", help=f"in quotes: {', '.join(WAYS['vllm'])}; default: the first five")
    parser.add_argument("--count", type=positive, default=16, help="sequences of held-out text (16)")
    parser.add_argument("--length", type=positive, default=1500, help="tokens of each (1500)")
    parser.add_argument("--tokens", type=positive, default=48, help="tokens to generate after each (48)")
    args = parser.parse_args(arguments)
    if unknown := set(args.ways or ()) - WAYS[args.engine].keys():
        parser.error(f"--ways: got {', '.join(sorted(unknown))}; accepted are {', '.join(WAYS[args.engine])}")
    check_engine(parser, args)
    try:
        context = read_config(args.checkpoint).max_position_embeddings
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.length + 1 + args.tokens > context:
        parser.error(f"--length, --tokens: at most {context - 1} together, got {args.length} and {args.tokens}")
    # The other ways are compared with the first one.
    ways = list(dict.fromkeys([DEFAULT_WAYS[0], *(args.ways or DEFAULT_WAYS)]))
    try:
        sequences = held_out_sequences(args.checkpoint, Tokenizer(args.checkpoint), args.length)[: args.count]
        expected = reference(args.checkpoint, sequences)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as directory:
        logs = args.logs or Path(directory)
        return print_rows(rows(args.engine, args.checkpoint, context, ways, sequences, expected, args.tokens, logs))


def rows(
    engine: str,
    checkpoint: Path,
    context: int,
    ways: Sequence[str],
    sequences: Sequence[Sequence[int]],
    expected: list[list[float]],
    tokens: int,
    logs: Path,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of every way. The first way is the one that the others are compared with. context: tokens of the
    longest sequence that the model takes."""
    alone: dict[str, Answers] = {}
    every = WAYS[engine]
    from_disk, limit = FROM_DISK[engine]
    # Ways with the same options share an engine.
    for options, group in itertools.groupby(ways, lambda way: every[way][0]):
        worker = [engine, str(checkpoint), "0", "2", json.dumps(from_disk | {limit: context} | options)]
        with started(worker, logs) as sides:
            for way in group:
                found = {side.side: answers_of(side, sequences, tokens, *every[way][1:]) for side in sides}
                for side, answers in found.items():
                    first = alone.setdefault(side, answers)
                    yield {"way": way, "side": side} | row(answers, expected, first)
                yield {"way": way} | texts(found["alone"], found["plugin"])


def answers_of(side: Side, sequences: Sequence[Sequence[int]], tokens: int, together: bool, again: bool) -> Answers:
    asked = {"answers": sequences, "tokens": tokens, "together": together, "logprobs": True}
    answers = side.ask(asked)["answers"]
    # Engines compute the log-probabilities of a prompt anew, and so do not read the cache.
    return side.ask(asked | {"logprobs": False})["answers"] if again else answers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
