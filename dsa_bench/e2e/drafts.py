"""What drafts gain in decoding: a plain step, a pass that verifies K drafts, and the drafter's passes.

usage: python -m dsa_bench.e2e.drafts [--models MODEL...] [--sequences N...] [--compile]

Prints a line of JSON for each row (`rows`); how long each step takes goes to the standard error. Kernels are compiled
before, in parallel; --compile does that alone, also where there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsa.runtime import backends
from dsa.runtime.asked_variants import asked_variants
from dsa.runtime.variants import Variant
from dsa.testing import copy_bandwidth
from dsa_bench.e2e.draft_gain import gain, tokens_a_round
from dsa_bench.e2e.draft_runs import DraftedDecoding
from dsa_bench.e2e.full_depth import Depths, depths, first_layers, full_depth
from dsa_bench.e2e.parallel_kernels import compile_ahead
from dsa_bench.e2e.parallel_rows import free, seconds_told
from dsa_bench.e2e.pass_bytes import cached_bytes, pass_bytes
from dsa_bench.e2e.stacks import STACKS, published_layers, skeleton, stack
from dsa_layers import options
from dsa_layers.compilation import passes
from dsa_layers.compilation.variants import with_all_tiles
from dsa_layers.families.model import CheckpointModel
from dsa_layers.layers import joint_linear

SEQUENCES, CONTEXT = (1, 8, 32, 128), 4096
DRAFTS = {"V3.2": (1, 2, 3), "V4-Flash": (1,), "GLM-5": (1,)}
Row = dict[str, Any]
Tell = Callable[[str], None]


def shape(model: str, count: int, drafts: int) -> str:
    return f"{model} decode {count} x {CONTEXT}, {drafts} draft{'s' if drafts > 1 else ''}"


def rows(
    names: Sequence[str] = tuple(STACKS),
    sequences: Sequence[int] = SEQUENCES,
    done: Collection[str] = (),
    device: torch.device | str = "cuda",
    tell: Tell = lambda step: None,
) -> Iterator[Row]:
    """{"shape", "model", "run", "sequences", "drafts", "layers", "plain", "verify", "draft_ms", "copy", "of_copy",
    "over_bytes", "tokens_a_round", "gain", "ms", "tokens/s", "figure"} of all models, numbers of sequences behind 4096
    tokens and numbers of drafts. done: shapes that are left out, as an earlier run has them.

    layers          of the published model, for all of which all figures are computed (`full_depth`)
    plain, verify   {"ms", "bytes", "touched", "depths"} of a pass over a token of each sequence, and over that and its
                    drafts: touched is how many experts get tokens, the mean over mixtures; depths are the
                    milliseconds that were measured, of the stack without layers, with its first one, and whole
    draft_ms        of the drafter's passes of a round, which was measured: it has one layer
    copy            bytes per second that a copy reads and writes
    of_copy         of a plain pass and a verifying one, the time that a copy's rate makes of its bytes over its own
    over_bytes      how many times as much time as a plain pass a verifying one takes, over how many times as many
                    bytes it reads
    tokens_a_round  with simulated acceptance: random weights accept nothing
    ms              of a round: verifying pass and drafter
    gain            tokens/s over those of plain passes (`draft_gain`)

    Times are of the GPU. Neither choosing tokens of logits nor what the host does between passes is in them.
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
    """Of all published layers; depths: the milliseconds that this is computed of."""

    ms: float
    bytes: float
    touched: float
    depths: Depths


def _measured(name: str, model: CheckpointModel, count: int, drafts: int) -> tuple[_Pass, float | None]:
    """A pass over a token and `drafts` drafts of each sequence; and milliseconds of the drafter, if there are some."""
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
    this = shape(name, count, drafts)
    row = {"shape": this, "model": name, "run": this.removeprefix(f"{name} "), "sequences": count, "drafts": drafts}
    row |= {"layers": published_layers(name), "draft_ms": draft_ms, "copy": copy}
    row |= {kind: vars(own) | {"depths": list(own.depths)} for kind, own in (("plain", plain), ("verify", verify))}
    row["of_copy"] = [own.bytes / copy * 1e3 / own.ms for own in (plain, verify)]
    row["over_bytes"] = verify.ms / plain.ms / (verify.bytes / plain.bytes)
    row |= {"tokens_a_round": tokens_a_round(drafts), "ms": verify.ms + draft_ms}
    row["gain"] = gain(plain.ms, verify.ms, draft_ms, drafts)
    row["tokens/s"] = count * row["tokens_a_round"] / row["ms"] * 1e3
    return row | {"figure": f"{row['gain']:.2f}x the tokens/s without drafts"}


def asked(
    names: Sequence[str] = tuple(STACKS), sequences: Sequence[int] = SEQUENCES, arch: str = "sm_90"
) -> list[Variant]:
    """The kernels that the rows ask for; sorted."""
    found: dict[Variant, None] = {}
    for name in names:
        model = skeleton(name, drafter=True)
        model.init_buffers(passes.META)
        joint_linear.join(model)
        pages = max(sequences) * -(-CONTEXT // model.page_size)
        cache = model.eval().make_cache(pages, model.page_size, passes.META, state_slots=max(sequences))
        with asked_variants(arch) as own:
            for count in sequences:
                for drafts in (0, *DRAFTS[name]):
                    passes.decode(model, cache, count, CONTEXT, drafts)
        found |= own
    return sorted(with_all_tiles(found), key=repr)


def compiled_rows(done: Collection[str] = ()) -> Iterator[Row]:
    """All rows, once their kernels are compiled in parallel. done: as of `rows`."""
    tell = seconds_told()
    compile_ahead(asked, tell)
    yield from rows(done=done, tell=tell)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsa_bench.e2e.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*STACKS], default=[*STACKS], help="default: all")
    parser.add_argument(
        "--sequences",
        nargs="+",
        type=options.positive,
        default=SEQUENCES,
        metavar="N",
        help=f"that decode: {' '.join(map(str, SEQUENCES))}",
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels alone, which needs no GPU")
    args = parser.parse_args(arguments)
    if wrong := [n for n in args.sequences if n & (n - 1)]:
        parser.error(f"--sequences: must be powers of two, which generation fills them up to, got {wrong[0]}")
    if not args.compile and (reason := backends.why_no_kernels()):
        parser.error(f"a benchmark needs a GPU with kernels: {reason}")
    tell = seconds_told()
    tell("modules are imported")
    compile_ahead(partial(asked, args.models, args.sequences), tell)
    if args.compile:
        return 0
    for row in rows(args.models, args.sequences, tell=tell):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
