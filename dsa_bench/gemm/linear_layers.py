"""FP8 products of all linear layers of the published models, each with all numbers of rows in ROWS, compared with
DeepGEMM 2.8.1 and cuBLASLt.

The receipt (tests/gpu/receipt.json) has some of these shapes, as rows of the benchmark `fp8_gemm_nt`, but no rows of
this benchmark. The layers are those that the op `fp8_gemm_nt` computes in models with the pinned configurations. V4's
`wo_a`, a grouped product, is not included. `kv_b_proj` of V3.2 and GLM-5 is included, because prompts expand their
latents to keys with it.
"""

import statistics
from collections.abc import Iterable
from functools import cache, lru_cache, partial
from typing import Any

import dsa
from dsa_bench.gemm import _published_layers
from dsa_bench.gemm.fp8_gemm_nt import SHORT, agree_on_some, products, weights_like
from dsa_bench.harness.case import Case, Scaled, activations, plain_rate, weights
from dsa_bench.peers import deep_gemm

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)
PROBED = [(128, 2112, 1536), (1, 2112, 1536)]
_PEERS = (deep_gemm.NEW,)


@cache
def shapes() -> list[tuple[int, int, int]]:
    """Return all (rows, columns, channels). The cases of a matrix follow one another, because they share
    `_operands`."""
    return [(rows, *shape) for shape in _published_layers.matrices() for rows in ROWS]


def __getattr__(name: str) -> Any:
    """Make SHAPES at its first use, because the models must be built to find their layers."""
    if name == "SHAPES":
        return shapes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def prepare() -> None:
    deep_gemm.compile_products(shapes(), builds=_PEERS)


def case(rows: int, columns: int, channels: int) -> Case:
    ((q, s), matrices), short = _operands(columns, channels), rows <= SHORT
    a, matrices = (q[:rows], s[:rows]), matrices if short else matrices[:1]
    return Case(
        f"{rows} x {columns} x {channels}",
        {"dsa": [partial(dsa.fp8_gemm_nt, a, b) for b in matrices]},
        plain_rate(columns * channels + rows * (channels + 2 * columns), 2 * rows * columns * channels),
        products(a, matrices, _PEERS),
        graph=short,
        repeats=7 if short else 4,
        agree=agree_on_some,
    )


@lru_cache(1)
def _operands(columns: int, channels: int) -> tuple[Scaled, list[Scaled]]:
    """Return (activations with max(ROWS) rows, all matrices that a case with one row needs). The cases of this size
    share them."""
    return activations(max(ROWS), channels), weights_like(weights(columns, channels), rows=1)


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Return a table as text: by number of rows, the speed-up over the best peer. rows: rows of this benchmark."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["ratio"] is not None:
            for group in (row["shape"].partition(" ")[0], "all"):
                ratios.setdefault(group, []).append(row["ratio"])
    lines = [f"{'rows':>8} {'shapes':>8} {'least':>8} {'median':>8} {'at least 1.00':>14}"]
    for group in sorted(ratios, key=lambda group: (group == "all", len(group), group)):
        found = ratios[group]
        share = sum(ratio >= 1 for ratio in found) / len(found)
        lines.append(f"{group:>8} {len(found):>8} {min(found):>8.2f} {statistics.median(found):>8.2f} {share:>14.0%}")
    return "\n".join(lines)
