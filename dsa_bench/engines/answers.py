"""`python -m dsa_bench.engines.answers vllm|sglang CHECKPOINT`: does an engine answer the same with dsa's plugin?

Per-token log-probabilities of held-out text are compared with the checkpoint's model in fp32, for the engine alone and
with the plugin, and the tokens that each generates greedily with each other. The same requests are sent in several
ways, which must not change an answer by more than rounding: one by one, together, again (from the prefix cache), in
chunks, and with a cache so small that the engine preempts requests.

Prints a line of JSON per way and side: `loss`, nats per token; `to_reference` and `to_alone`, the mean absolute
difference of log-probabilities to the model in fp32 and to the same side's answers one by one; `same_text`, the share
of requests whose generated tokens are those of the same side one by one. A last line per way counts the requests whose
generated tokens are equal with and without the plugin.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsa_bench.e2e.held_out_text import held_out_sequences
from dsa_bench.engines.command import add_engine, check_engine, positive
from dsa_bench.engines.turns import started
from dsa_layers import Tokenizer, load_model
from dsa_layers.evaluation.held_out_loss import predictions

Answers = list[dict[str, Any]]  # of each request: `logprobs` of the prompt's tokens but the first, and `tokens`
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
CONTEXT = 2048  # of the trained checkpoints
FROM_DISK = {
    "vllm": {"load_format": "auto", "max_model_len": CONTEXT},
    "sglang": {"load_format": "auto", "context_length": CONTEXT},
}


def reference(checkpoint: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-probabilities of the sequences' tokens but the first, by the model in fp32."""
    model = load_model(checkpoint, device="cpu", dtype=torch.float32, dequantize=True, progress=False)
    found: list[float] = []
    for logits, targets in predictions(model, sequences, 1 << 20):
        found += logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1).tolist()
    lengths = [len(tokens) - 1 for tokens in sequences]
    return [list(map(float, part)) for part in torch.tensor(found).split(lengths)]


def row(answers: Answers, expected: list[list[float]], alone: Answers) -> dict[str, float]:
    same = sum(answer["tokens"] == one["tokens"] for answer, one in zip(answers, alone, strict=True)) / len(answers)
    if not answers[0]["logprobs"]:
        return {"same_text": same}
    every = torch.cat([torch.tensor(answer["logprobs"]) for answer in answers])
    first = torch.cat([torch.tensor(answer["logprobs"]) for answer in alone])
    return {
        "loss": -every.mean().item(),
        "to_reference": (every - torch.cat([*map(torch.tensor, expected)])).abs().mean().item(),
        "to_alone": (every - first).abs().mean().item(),
        "same_text": same,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.engines.answers", description=__doc__.splitlines()[0])
    add_engine(parser)
    parser.add_argument("checkpoint", type=Path, help="directory of a model that examples/train_indexer.py has trained")
    parser.add_argument("--ways", nargs="*", help=f"in quotes: {', '.join(WAYS['vllm'])}; default: the first five")
    parser.add_argument("--count", type=positive, default=16, help="sequences of held-out text (16)")
    parser.add_argument("--length", type=positive, default=1500, help="tokens of each (1500)")
    parser.add_argument("--tokens", type=positive, default=48, help="tokens to generate after each (48)")
    args = parser.parse_args(arguments)
    every = WAYS[args.engine]
    if unknown := set(args.ways or ()) - every.keys():
        parser.error(f"--ways: got {', '.join(sorted(unknown))}; accepted are {', '.join(every)}")
    if args.length + 1 + args.tokens > CONTEXT:
        parser.error(f"--length, --tokens: at most {CONTEXT - 1} together, got {args.length} and {args.tokens}")
    check_engine(parser, args)
    # The other ways are compared with the first one.
    ways = list(dict.fromkeys([DEFAULT_WAYS[0], *(args.ways or DEFAULT_WAYS)]))
    try:
        sequences = held_out_sequences(args.checkpoint, Tokenizer(args.checkpoint), args.length)[: args.count]
        expected = reference(args.checkpoint, sequences)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    alone: dict[str, Answers] = {}
    with tempfile.TemporaryDirectory() as directory:
        logs = args.logs or Path(directory)
        for way in ways:
            options, together, again = every[way]
            options = FROM_DISK[args.engine] | options
            worker = [args.engine, str(args.checkpoint), "0", "2", json.dumps(options)]
            texts: dict[str, Answers] = {}
            with started(worker, logs) as sides:
                for side in sides:
                    asked = {"answers": sequences, "tokens": args.tokens, "together": together, "logprobs": True}
                    answers = side.ask(asked)["answers"]
                    if again:  # engines compute the log-probabilities of a prompt anew, and so do not read the cache
                        answers = side.ask(asked | {"logprobs": False})["answers"]
                    texts[side.side] = answers
                    first = alone.setdefault(side.side, answers)
                    print(json.dumps({"way": way, "side": side.side} | row(answers, expected, first)), flush=True)
            pairs = zip(texts["alone"], texts["plugin"], strict=True)
            print(json.dumps({"way": way, "same_text_as_alone": sum(a["tokens"] == b["tokens"] for a, b in pairs)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
