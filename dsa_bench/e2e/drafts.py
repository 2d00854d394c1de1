"""The gain of drafts in decoding, computed from measured times of a step without drafts, of a pass that verifies K
drafts per sequence, and of the drafter's passes."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from dsa.runtime.variants import Variant
from dsa.testing import bench
from dsa_bench.e2e.command import Row, Tell, asked_of, by_stack, free, in_order, of_models, quiet
from dsa_bench.e2e.full_depth import (
    cached_bytes,
    depths,
    experts_touched,
    first_layers,
    full_depth,
    pass_bytes,
)
from dsa_bench.e2e.runs import Cached, fill, filled
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, stack
from dsa_bench.harness.case import copy
from dsa_layers.generation.steps import CapturedStep, DecodeStep, DraftStep
from dsa_layers.models.protocols import CheckpointModel

# Probability that a draft is accepted if all drafts before it are. DeepSeek-V3's report gives 85 to 90% for the first
# draft.
ACCEPTANCE = 0.85
SEQUENCES, CONTEXT = (1, 8, 32, 128), 4096
DRAFTS = {"V3.2": (1, 2, 3), "V4-Flash": (1,), "GLM-5": (1,)}
REPEATS = 20
OPTIONS = of_models(STACKS)


def tokens_a_round(drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """Return the expected tokens per sequence and round, 1 + p + ... + p^K, with p = acceptance and K = drafts.

    A draft is accepted only if all drafts before it are accepted.
    """
    return sum(acceptance**i for i in range(drafts + 1))


def gain(plain_ms: float, verify_ms: float, draft_ms: float, drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """Return tokens/s with drafts over tokens/s without: (tokens per round / (verify + draft)) / (1 / plain)."""
    return tokens_a_round(drafts, acceptance) * plain_ms / (verify_ms + draft_ms)


def run_of(count: int, drafts: int) -> str:
    return f"decode {count} x {CONTEXT}, {drafts} draft{'s' if drafts > 1 else ''}"


class DraftedDecoding:
    """Decoding of `count` sequences of `context` tokens each. The last `drafts` tokens of a sequence are drafts. The
    caches contain random numbers, and no two tokens of a pass are equal. The constructor runs the pass once.

    touched: the number of experts with tokens in a pass, per MoE layer.
    """

    def __init__(self, model: CheckpointModel, count: int, context: int, drafts: int) -> None:
        self._model, self._drafts, self._device = model, drafts, next(model.parameters()).device
        self._cache, places = filled(model, count, context)
        # The last token of the sequence in state slot s is 1 + s (`Cached`), so drafts are tokens from 1 + count on.
        guesses = [tuple(1 + count + slot * drafts + i for i in range(drafts)) for _, slot in places]
        self._sequences = [Cached(*place, context - drafts, some) for place, some in zip(places, guesses)]
        self._step = _RepeatedDecode(model, self._cache, drafts=drafts, capture=False)
        with experts_touched() as found:
            _, self._states = self._step(self._sequences)
        self.touched = [int(number) for number in found]

    def pass_ms(self, layers: int) -> float:
        """Return the milliseconds of a pass of the first `layers` layers over each sequence's last token and drafts."""
        with first_layers(self._model, layers):
            return _graph_ms(self._step.again)

    def drafting_ms(self) -> float:
        """Return the milliseconds of the drafter's passes in a round in which all drafts were accepted. They compute
        the drafter's layer and the head once per new draft."""
        step = _RepeatedDraft(
            self._model.drafter, self._cache, self._drafts, self._step.padding, self._device, capture=False
        )
        fill(step.cache)
        step(self._sequences, [[*sequence.drafts, sequence.tokens[-1]] for sequence in self._sequences], self._states)
        return _graph_ms(step.again)


class _Repeated(CapturedStep[Any]):
    """A step that keeps the inputs of the last pass. `again` launches that pass again, without the host's work that
    makes the inputs."""

    def _run(self, inputs: Any) -> Any:
        self._inputs = inputs
        return super()._run(inputs)

    @torch.inference_mode()
    def again(self) -> Any:
        return super()._run(self._inputs)


class _RepeatedDecode(_Repeated, DecodeStep):
    pass


class _RepeatedDraft(_Repeated, DraftStep):
    pass


def _graph_ms(call: Callable[[], Any]) -> float:
    return bench({"call": call}, repeats=REPEATS, graph=True)["call"]


def rows(
    models: Sequence[str] = tuple(STACKS),
    sequences: Sequence[int] = SEQUENCES,
    done: Collection[str] = (),
    device: torch.device | str = "cuda",
    tell: Tell = quiet,
) -> Iterator[Row]:
    """Yield {"shape", "model", "run", "sequences", "drafts", "layers", "plain", "verify", "draft_ms", "copy",
    "of_copy", "over_bytes", "tokens_a_round", "gain", "ms", "tokens/s", "figure"} per model, number of sequences and
    number of drafts. A sequence has CONTEXT tokens. done: shapes of an earlier run, which are left out.

    layers          number of layers of the published model; ms and bytes of `plain` and `verify` are for all of them
                    (`full_depth`)
    plain, verify   {"ms", "bytes", "touched", "depths"} of a pass over one token per sequence, and of a pass over this
                    token and the drafts. bytes: the bytes that the pass reads (`pass_bytes`). touched: the number of
                    experts with tokens, averaged over the MoE layers. depths: the measured milliseconds of the stack
                    without layers, with its first layer, and with all layers
    draft_ms        milliseconds of the drafter's passes per round; measured, because the drafter has one layer
    copy            bytes per second that a copy reads and writes
    of_copy         [plain, verify]: the time to copy the pass's bytes / the pass's time
    over_bytes      (verify ms / plain ms) / (verify bytes / plain bytes)
    tokens_a_round  expected tokens per sequence and round with ACCEPTANCE (`tokens_a_round`), because with random
                    weights no draft is accepted
    ms              milliseconds of a round: the verifying pass and the drafter's passes
    gain            tokens/s over tokens/s without drafts (`gain`)

    Times are GPU times. They include neither sampling nor the host's work between passes.
    """

    def todo(name: str) -> list[tuple[int, int]]:
        runs = [(count, drafts) for count in sorted(sequences) for drafts in DRAFTS[name]]
        return [run for run in runs if f"{name} {run_of(*run)}" not in done]

    def make(name: str) -> CheckpointModel:
        # The first call of `copy` measures and needs 4 GiB, so it comes before a model fills the memory.
        tell(f"a copy: {copy() / 1e9:.0f} GB/s")
        free()
        return stack(name, device, drafter=True)

    def of_stack(name: str, model: CheckpointModel, runs: Sequence[tuple[int, int]]) -> Iterator[Row]:
        for count, of_count in groupby(runs, lambda run: run[0]):
            plain, _ = _measured(name, model, count, 0)
            tell(f"{name}, {count} sequences: {plain['ms']:.2f} ms")
            for _, drafts in of_count:
                verify, draft_ms = _measured(name, model, count, drafts)
                row = _row(name, count, drafts, plain, verify, draft_ms)
                tell(f"{row['shape']}: {verify['ms']:.2f} + {draft_ms:.2f} ms, {row['figure']}")
                yield row

    return by_stack(models, todo, make, of_stack, tell)


def _measured(name: str, model: CheckpointModel, count: int, drafts: int) -> tuple[Row, float | None]:
    """Measure a pass over a token and `drafts` drafts per sequence. Return ({"ms", "bytes", "depths", "touched"} as in
    `rows`, the drafter's milliseconds or None without drafts)."""
    run = DraftedDecoding(model, count, CONTEXT, drafts)
    ms = [run.pass_ms(layers) for layers in depths(model)]
    cached, read = cached_bytes(model, count, CONTEXT), []
    for layers in depths(model):
        with first_layers(model, layers):
            read.append(pass_bytes(model, run.touched, cached))
    found = {"ms": full_depth(name, *ms), "bytes": full_depth(name, *read), "depths": ms}
    found["touched"] = sum(run.touched) / len(run.touched)
    return found, run.drafting_ms() if drafts else None


def _row(name: str, count: int, drafts: int, plain: Row, verify: Row, draft_ms: float) -> Row:
    run, ms, per_round = run_of(count, drafts), verify["ms"] + draft_ms, tokens_a_round(drafts)
    gained = gain(plain["ms"], verify["ms"], draft_ms, drafts)
    return {
        "shape": f"{name} {run}",
        "model": name,
        "run": run,
        "sequences": count,
        "drafts": drafts,
        "layers": published_layers(name),
        "draft_ms": draft_ms,
        "copy": copy(),
        "plain": plain,
        "verify": verify,
        "of_copy": [one["bytes"] / copy() * 1e3 / one["ms"] for one in (plain, verify)],
        "over_bytes": verify["ms"] / plain["ms"] / (verify["bytes"] / plain["bytes"]),
        "tokens_a_round": per_round,
        "ms": ms,
        "gain": gained,
        "tokens/s": count * per_round / ms * 1e3,
        "figure": f"{gained:.2f}x the tokens/s without drafts",
    }


def asked(
    models: Sequence[str] = tuple(STACKS), sequences: Sequence[int] = SEQUENCES, done: Collection[str] = ()
) -> list[Variant]:
    return in_order(
        asked_of(
            skeleton(name, drafter=True),
            [],
            [(count, CONTEXT, number) for count in sequences for number in (0, *DRAFTS[name])],
        )
        for name in models
    )
