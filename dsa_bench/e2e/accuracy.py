"""Errors of whole passes with trained weights: our kernels and the peers' against the references in fp32.

usage: python -m dsa_bench.e2e accuracy [CHECKPOINT...]

CHECKPOINT is a model that examples/train_indexer.py wrote; the default is the model that comes with dsa. The peers need
a model with at least 32 index heads and 64 attention heads. This command trains one:

    python examples/train_indexer.py OUT --seconds 200 40 30 --batch 16 8 8 \\
        --config '{"num_attention_heads": 64, "index_n_heads": 32, "index_topk": 512}'

Every sequence of the held-out text is one pass. The references compute the expected logits in fp32, with the same
weights and the same quantisation of activations, index keys and caches. The error of a sequence is
|logits - expected| / |expected|, in 2-norms over all tokens and the vocabulary. All kernels compute the same sequences.
An interval contains the middle 95% of the means of RESAMPLES random samples. Each sample draws sequences with
replacement, as many as the text has, and the same sequences for all kernels (paired bootstrap).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch.nn.functional import cross_entropy, kl_div

import dsa
from dsa_bench.e2e.command import Row, Tell, quiet
from dsa_bench.e2e.held_out_text import held_out_sequences
from dsa_bench.e2e.peers import Replaced, replacement
from dsa_bench.harness.calls import reason
from dsa_layers import SHIPPED_MODEL, Tokenizer, load_model
from dsa_layers.evaluation import predictions
from dsa_layers.models.protocols import Model

RESAMPLES = 10_000
PEERS = "peers"
KERNELS = {"ours, fp16 accumulators": torch.float16, "ours, fp32 accumulators": torch.float32}
OPTIONS = {"checkpoints": {"nargs": "*", "type": Path, "default": [SHIPPED_MODEL], "metavar": "CHECKPOINT"}}
Interval = list[float]  # the mean, and the lower and upper end of its 95% interval


@torch.inference_mode()
def logits_of(model: Model, tokens: Sequence[int], chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [T, vocab_size] in fp32 and the targets [T] of all tokens but the last one."""
    logits, targets = zip(*((x.float(), y) for x, y in predictions(model, [tokens], chunk)))
    return torch.cat(logits), torch.cat(targets)


@dataclass(frozen=True)
class Difference:
    """How predictions q of a text differ from predictions p that they are compared with.

    loss, expected_loss  mean of -log q and of -log p of the text's tokens, in nats
    error                |logits - expected logits| / |expected logits|, 2-norms over positions and vocabulary
    divergence           mean over positions of KL(p || q) = sum_v p_v (log p_v - log q_v), in nats
    largest              largest |log q - log p| of a token of the text
    same_first           share of positions at which both have the same likeliest token
    """

    loss: float
    expected_loss: float
    error: float
    divergence: float
    largest: float
    same_first: float

    @classmethod
    def between(cls, logits: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> Self:
        """logits, expected: [T, vocab_size]; targets: [T]."""
        logits, expected = logits.float(), expected.float()
        q, p = logits.log_softmax(-1), expected.log_softmax(-1)
        losses = [cross_entropy(x, targets, reduction="none") for x in (q, p)]
        return cls(
            *(x.mean().item() for x in losses),
            error=((logits - expected).norm() / expected.norm()).item(),
            divergence=kl_div(q, p, log_target=True, reduction="batchmean").item(),
            largest=(losses[0] - losses[1]).abs().max().item(),
            same_first=(q.argmax(-1) == p.argmax(-1)).float().mean().item(),
        )


def rows(
    checkpoints: Sequence[Path] = (SHIPPED_MODEL,),
    most: int | None = None,
    device: torch.device | str = "cuda",
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "kernels", "sequences", "tokens", "loss", "loss_difference", "error", "divergence",
    "same_first", "over_peers", "figure"} per checkpoint and set of kernels. The sets are our kernels with fp16
    accumulation of the index scores, our kernels with fp32 accumulation, and the peers' kernels. most: the largest
    number of sequences, None for all.

    loss             nats per token
    loss_difference  Interval of the loss minus the references' loss
    error            Interval of the error
    divergence       Interval of KL(references || kernels), nats per token
    same_first       fraction of positions with the references' most likely token
    over_peers       Interval of our error / the peers' error; None in the peers' row and without peers' errors
    figure           the mean error as text, and over_peers if there is one; "failed: REASON" if the peers fail

    If the peers fail, their row lacks the keys from "loss" to "over_peers".
    """
    for checkpoint in checkpoints:
        tell(str(checkpoint))
        model = load_model(checkpoint, device=device, progress=False)
        config = model.config
        length, label = config.max_position_embeddings, f"{config.num_attention_heads} heads"
        label += f", {config.index_n_heads} index heads, top-k {config.index_topk}"
        sequences = held_out_sequences(checkpoint, Tokenizer(checkpoint), length)[:most]
        differences = _differences(checkpoint, model, sequences, device)
        theirs = differences.get(PEERS)
        peers_errors = _values(theirs, "error") if isinstance(theirs, list) else None
        for name, found in differences.items():
            figures = {"figure": f"failed: {found}"}
            if not isinstance(found, str):
                figures = _figures(found, peers_errors if name in KERNELS else None)
            yield {
                "shape": f"{label}: {name}",
                "model": label,
                "kernels": name,
                "sequences": len(sequences),
                "tokens": len(sequences) * length,
            } | figures


def _differences(
    checkpoint: Path, model: Model, sequences: Sequence[Sequence[int]], device: torch.device | str
) -> dict[str, list[Difference] | str]:
    """Return {kernels: a Difference per sequence, or the reason why the peers failed}. Without peers there is no entry
    PEERS."""
    exact = load_model(checkpoint, device=device, dtype=torch.float32, progress=False)
    indexers = [module for module in model.modules() if hasattr(module, "accumulators")]
    peers: Replaced = replacement()
    found: dict[str, list[Difference] | str] = {name: [] for name in KERNELS}
    if peers.ops:
        found[PEERS] = []
    for sequence in sequences:
        with dsa.use_backend("reference"):
            expected, targets = logits_of(exact, sequence, len(sequence))

        for name, accumulators in KERNELS.items():
            for indexer in indexers:
                indexer.accumulators = accumulators
            logits, _ = logits_of(model, sequence, len(sequence))
            found[name].append(Difference.between(logits, expected, targets))

        if isinstance(found.get(PEERS), list):
            try:
                with peers.in_place():
                    logits, _ = logits_of(model, sequence, len(sequence))
            except Exception as error:  # libraries raise various errors for shapes that they do not accept
                found[PEERS] = reason(error)
            else:
                found[PEERS].append(Difference.between(logits, expected, targets))
    return found


def _figures(differences: Sequence[Difference], peers_errors: torch.Tensor | None) -> Row:
    errors = _values(differences, "error")
    loss = _values(differences, "loss")
    found: Row = {
        "loss": loss.mean().item(),
        "loss_difference": interval(loss - _values(differences, "expected_loss")),
        "error": interval(errors),
        "divergence": interval(_values(differences, "divergence")),
        "same_first": _values(differences, "same_first").mean().item(),
        "over_peers": None if peers_errors is None else interval(errors, peers_errors),
    }
    found["figure"] = f"error {found['error'][0]:.3%}"
    if found["over_peers"]:
        ratio, low, high = found["over_peers"]
        found["figure"] += f", {ratio:.3f} of the peers' ({low:.3f} to {high:.3f})"
    return found


def _values(differences: Sequence[Difference], name: str) -> torch.Tensor:
    return torch.tensor([getattr(difference, name) for difference in differences], dtype=torch.float64)


def interval(values: torch.Tensor, over: torch.Tensor | None = None) -> Interval:
    """Return [mean, lower end, upper end] of the 95% interval by the paired bootstrap. The mean is the mean of `values`
    [N] or, with `over` [N], mean(values) / mean(over)."""
    samples = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
    means, mean = values[samples].mean(1), values.mean()
    if over is not None:
        means, mean = means / over[samples].mean(1), mean / over.mean()
    return [mean.item(), *means.quantile(means.new_tensor([0.025, 0.975])).tolist()]
