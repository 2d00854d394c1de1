"""What drafts gain in decoding: a plain step, a pass that verifies K drafts, and the drafter's passes.

usage: python -m dsa_bench.e2e.drafts [--models MODEL...] [--compile]

Prints a line of JSON for each row (`rows`); the time of each step goes to the standard error. Kernels are compiled
before, in parallel; --compile does only that, also where there is no GPU.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dsa.runtime.variants import Variant
from dsa.testing import copy_bandwidth
from dsa_bench.e2e.command import Row, Tell, asked_of, compiled, free, in_order, parser, quiet, run
from dsa_bench.e2e.draft_runs import DraftedDecoding
from dsa_bench.e2e.full_depth import Depths, cached_bytes, depths, first_layers, full_depth, pass_bytes
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, stack
from dsa_layers.cache.cache import Cache
from dsa_layers.compilation import passes
from dsa_layers.families.model import CheckpointModel

ACCEPTANCE = 0.85  # of a draft after accepted ones; the papers report 85 to 90% of first drafts
SEQUENCES, CONTEXT = (1, 8, 32, 128), 4096
DRAFTS = {"V3.2": (1, 2, 3), "V4-Flash": (1,), "GLM-5": (1,)}


def tokens_a_round(drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """1 + p + ... + p^K: a draft counts where all before it are accepted."""
    return sum(acceptance**i for i in range(drafts + 1))


def gain(plain_ms: float, verify_ms: float, draft_ms: float, drafts: int, acceptance: float = ACCEPTANCE) -> float:
    """(tokens per round / (verify + draft)) / (1 / plain): the tokens/s over those without drafts."""
    return tokens_a_round(drafts, acceptance) * plain_ms / (verify_ms + draft_ms)


def shape(model: str, count: int, drafts: int) -> str:
    return f"{model} decode {count} x {CONTEXT}, {drafts} draft{'s' if drafts > 1 else ''}"


def rows(
    names: Sequence[str] = tuple(STACKS),
    sequences: Sequence[int] = SEQUENCES,
    done: Collection[str] = (),
    device: torch.device | str = "cuda",
    tell: Tell = quiet,
) -> Iterator[Row]:
    """{"shape", "model", "run", "sequences", "drafts", "layers", "plain", "verify", "draft_ms", "copy", "of_copy",
    "over_bytes", "tokens_a_round", "gain", "ms", "tokens/s", "figure"} of all models, numbers of sequences after 4096
    tokens and numbers of drafts. done: shapes of an earlier run, which are left out.

    layers          of the published model; all figures are computed for all of them (`full_depth`)
    plain, verify   {"ms", "bytes", "touched", "depths"} of a pass over one token of each sequence, and over this token
                    and the drafts. touched: how many experts get tokens, the mean over mixtures. depths: the measured
                    milliseconds of the stack without layers, with its first one, and whole
    draft_ms        of the drafter's passes per round, measured: the drafter has one layer
    copy            bytes per second that a copy reads and writes
    of_copy         for a plain pass and a verifying one, the time of copying its bytes over its time
    over_bytes      a verifying pass's time over a plain one's, over the same ratio of their bytes
    tokens_a_round  with simulated acceptance: random weights accept nothing
    ms              of a round: verifying pass and drafter
    gain            tokens/s over those of plain passes (`draft_gain`)

    Times are the GPU's. They include neither sampling nor the host's work between passes.
    """
    copy = None
    for name in names:
        todo = [(n, k) for n in sorted(sequences) for k in DRAFTS[name] if shape(name, n, k) not in done]
        if not todo:
            continue
        if copy is None:
            copy = copy_bandwidth()
            free()
            tell(f"a copy: {copy / 1e9:.0f} GB/s")
        model = stack(name, device, drafter=True)
        tell(f"{name}: drawn")
        for count in dict.fromkeys(n for n, _ in todo):
            plain, _ = _measured(name, model, count, 0)
            tell(f"{name}, {count} sequences: {plain.ms:.2f} ms")
            for drafts in (k for n, k in todo if n == count):
                verify, draft_ms = _measured(name, model, count, drafts)
                row = _row(name, count, drafts, plain, verify, draft_ms, copy)
                tell(f"{row['shape']}: {verify.ms:.2f} + {draft_ms:.2f} ms, {row['figure']}")
                yield row
        del model
        free()


@dataclass(frozen=True)
class _Pass:
    """For all published layers. depths: the milliseconds that ms is computed from."""

    ms: float
    bytes: float
    touched: float
    depths: Depths


def _measured(name: str, model: CheckpointModel, count: int, drafts: int) -> tuple[_Pass, float | None]:
    """A pass over a token and `drafts` drafts of each sequence; and the drafter's milliseconds, if there are drafts."""
    run = DraftedDecoding(model, count, CONTEXT, drafts)
    ms = Depths(*map(run.pass_ms, depths(model)))
    cached, read = cached_bytes(model, count, CONTEXT), []
    for layers in depths(model):
        with first_layers(model, layers):
            read.append(pass_bytes(model, run.touched, cached))
    draft_ms = run.drafting_ms() if drafts else None
    touched = sum(run.touched) / len(run.touched)
    return _Pass(full_depth(name, ms), full_depth(name, Depths(*read)), touched, ms), draft_ms


def _row(name: str, count: int, drafts: int, plain: _Pass, verify: _Pass, draft_ms: float, copy: float) -> Row:
    this, ms, per_round = shape(name, count, drafts), verify.ms + draft_ms, tokens_a_round(drafts)
    gained = gain(plain.ms, verify.ms, draft_ms, drafts)
    return {
        "shape": this,
        "model": name,
        "run": this.removeprefix(f"{name} "),
        "sequences": count,
        "drafts": drafts,
        "layers": published_layers(name),
        "draft_ms": draft_ms,
        "copy": copy,
        "plain": vars(plain) | {"depths": list(plain.depths)},
        "verify": vars(verify) | {"depths": list(verify.depths)},
        "of_copy": [own.bytes / copy * 1e3 / own.ms for own in (plain, verify)],
        "over_bytes": verify.ms / plain.ms / (verify.bytes / plain.bytes),
        "tokens_a_round": per_round,
        "ms": ms,
        "gain": gained,
        "tokens/s": count * per_round / ms * 1e3,
        "figure": f"{gained:.2f}x the tokens/s without drafts",
    }


def asked(names: Sequence[str] = tuple(STACKS), sequences: Sequence[int] = SEQUENCES) -> list[Variant]:
    """The kernels that the rows ask for, sorted."""

    def steps(drafts: Sequence[int], model: CheckpointModel, cache: Cache) -> None:
        for count in sequences:
            for number in drafts:
                passes.decode(model, cache, count, CONTEXT, number)

    most = max(sequences)
    return in_order(
        asked_of(skeleton(name, drafter=True), most * CONTEXT, most, partial(steps, (0, *DRAFTS[name])))
        for name in names
    )


def compiled_rows(done: Collection[str] = ()) -> Iterator[Row]:
    """All rows, once their kernels are compiled in parallel. done: as in `rows`."""
    return compiled(asked, partial(rows, done=done))


def main(arguments: Sequence[str]) -> int:
    options = parser("drafts", __doc__, STACKS)
    args = options.parse_args(arguments)
    return run(options, args.compile, partial(asked, args.models), partial(rows, args.models))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
