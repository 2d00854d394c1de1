"""What `dsa verify` measures of a loaded model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, kl_div

from dsa_layers.evaluation.held_out_loss import predictions
from dsa_layers.families.model import Model
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.results import Throughput
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.parallel.ranks import ALONE, Ranks

_NUMBERS = 2**26  # that are looked at in one step


@dataclass(frozen=True)
class TensorCheck:
    """tensors, numbers: of the parameters and buffers of all ranks; not_finite: names of those with NaN or infinity."""

    tensors: int
    numbers: int
    not_finite: list[str]

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Model) -> Self:
        tensors = dict(model.state_dict())
        bad = sorted(name for name, x in tensors.items() if x.dtype.is_floating_point and not _is_finite(x))
        own = len(tensors), sum(x.numel() for x in tensors.values()), bad
        ranks: Ranks = getattr(model, "ranks", ALONE)
        of_ranks = [own] * ranks.size
        if ranks.group is not None:
            dist.all_gather_object(of_ranks, own, group=ranks.group)
        names = sorted({name for _, _, bad in of_ranks for name in bad})
        return cls(sum(count for count, _, _ in of_ranks), sum(numbers for _, numbers, _ in of_ranks), names)


def _is_finite(x: torch.Tensor) -> bool:
    return all(part.float().isfinite().all() for part in x.flatten().split(_NUMBERS))


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


@torch.inference_mode()
def logits_of(model: Model, tokens: Sequence[int], chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [T, vocab_size] in fp32 and the targets [T] of all tokens but the last one."""
    logits, targets = zip(*((x.float(), y) for x, y in predictions(model, [tokens], chunk)))
    return torch.cat(logits), torch.cat(targets)


@dataclass(frozen=True)
class Speed:
    """prompts: {tokens: prompt tokens a second}; steps: {sequences: new tokens a second of all of them}."""

    prompts: dict[int, float]
    steps: dict[int, float]

    @classmethod
    def of(
        cls, model: Model, tokens: Sequence[int], prompts: Sequence[int], sequences: Sequence[int], new: int
    ) -> Self:
        """Each of the second of two runs: in the first one kernels are loaded and graphs captured. tokens: of a text
        as long as the longest prompt; steps give `new` tokens after 128 of them."""
        longest, begin = max(prompts), list(tokens[:128])
        room = max(longest + 1, max(sequences) * (len(begin) + new))
        generator = Generator(model, cache_tokens=room + max(sequences) * model.page_size)

        def measured(given: list[list[int]], count: int) -> Throughput:
            for _ in range(2):
                generator.generate(given, SamplingParams(max_tokens=count))
            return generator.throughput

        def prompt_rate(length: int) -> float:
            done = measured([list(tokens[:length])], 1)
            return done.prefill_tokens / done.prefill_seconds

        def step_rate(count: int) -> float:
            done = measured([begin] * count, new)
            return done.decode_tokens / done.decode_seconds if done.decode_tokens else 0.0

        return cls({n: prompt_rate(n) for n in prompts}, {n: step_rate(n) for n in sequences})
