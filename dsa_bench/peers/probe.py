"""Run every peer and report whether it runs and agrees with the reference, or with our kernel where the reference
cannot run our call.

The cases are those of the benchmarks, with the small shapes that a benchmark lists as PROBED, so benchmarks make the
same calls. The report begins with the libraries that are not installed or cannot be imported.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

import dsa
from dsa_bench.harness import case as cases
from dsa_bench.harness.calls import Peers, free, reason
from dsa_bench.peers import cudnn, deep_gemm, flash_mla, hyper_connections, marlin, operators, topk

LIBRARIES = (
    *flash_mla.BUILDS,
    *deep_gemm.BUILDS,
    *operators.BUILDS,
    marlin.MARLIN,
    topk.DEEPSELECT,
    hyper_connections.TILE,
    cudnn.CUDNN,
)


def probed() -> dict[str, list[tuple]]:
    modules = {op: cases.load(op) for op in cases.benchmarks()}
    return {op: module.PROBED for op, module in modules.items() if hasattr(module, "PROBED")}


def missing() -> list[str]:
    found = Peers.of({library: lambda module: module for library in LIBRARIES}, [()])
    names = [library.name for library in LIBRARIES if library.name not in found.calls]
    return [f"{name}: {found.failed.get(name, 'not installed')}" for name in names]


def outcomes(ops: Iterable[str] = ()) -> Iterator[tuple[str, str, str, str]]:
    """Yield (op, shape, peer, "ok" or the failure) for every peer of every PROBED case of these ops, by default of all.
    If our call or the inputs fail, the peer is "dsa"."""
    shapes = probed()
    for op in ops or shapes:
        for shape in shapes[op]:
            try:
                yield from _of(op, shape)
            except Exception as error:  # our call or the inputs fail; continue with the next case
                yield op, str(shape), cases.OURS, f"failed: {reason(error)}"
            free()


def _of(op: str, shape: tuple) -> Iterator[tuple[str, str, str, str]]:
    torch.manual_seed(0)
    case = cases.load(op).case(*shape)
    peers = [name for name in case.calls if name not in (cases.OURS, *case.baselines, *case.yardsticks)]
    expected = None
    if peers and case.reference:
        with dsa.use_backend("reference"):
            expected = case.calls[cases.OURS][0]()
    why = case.tried(expected)
    for name in dict.fromkeys((*peers, *why)):
        yield op, case.name, name, why.get(name, "ok")


def main(ops: Sequence[str] = ()) -> int:
    """Probe the peers of these ops (default: all) and print a line per peer and case. Return 1 if anything fails or
    disagrees, otherwise 0."""
    if unknown := set(ops) - probed().keys():
        raise ValueError(f"ops: must be of {', '.join(probed())}, got {', '.join(sorted(unknown))}")
    wrong = 0
    for line in missing():
        print(line)
        wrong += "failed" in line
    for op, shape, name, outcome in outcomes(ops):
        print(f"{name:<28} {op:<30} {shape:<58} {outcome}", flush=True)
        wrong += outcome != "ok"
    return 1 if wrong else 0
