"""Every peer once: does its call run, and does it compute what the reference computes?

The cases are the benchmarks' own, of small shapes, so what is called here is what is timed there. Libraries that are
not installed are named first.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence

import torch

import dsa
from dsa_bench.harness import case as cases
from dsa_bench.peers import cudnn, deep_gemm, flash_mla, operators
from dsa_bench.peers.package import reason

LIBRARIES = (*flash_mla.BUILDS, *deep_gemm.BUILDS, operators.OPERATORS, cudnn.CUDNN)
# op -> arguments of its benchmark's case: all peers' functions, and every kind of argument that their calls depend on.
SHAPES: dict[str, list[tuple]] = {
    "flash_mla_sparse_fwd": [(4096, 576, 64, 2048, 128), (4096, 512, 128, 512, 128), (4096, 576, 16, 512, 128)],
    "flash_mla_with_kvcache": [(4, 1024, 16, 1), (4, 1024, 128, 2)],
    "flash_mla_with_kvcache_sparse": [(4, 64, 1, 512, 4096), (2, 128, 2, 2048, 4096), (2, 16, 1, 512, 4096)],
    "fp8_gemm_nt": [(128, 2112, 1536, None, None), (1, 2112, 1536, None, None), (256, 1024, 512, 16, 2)],
    "fp8_mqa_logits": [(512, 4096, 64, 128, True), (512, 4096, 32, 64, False)],
    "fp8_paged_mqa_logits": [
        *((4, n, 4096, heads) for n, heads in ((1, 64), (2, 64), (4, 64), (1, 32))),
        (4, 1, 0, 64),
    ],
    "merge_attention": [(128, 16, 2, False)],
    "per_token_cast_to_fp8": [(128, 7168, False, True), (128, 7168, False, False)],
    "sliding_window_attention": [("prefill", 512, 64), ("prefill, 512 selected", 2048, 64), ("decode", 4, 64)],
    "sparse_mla_attention": [(512, 64, 512, False)],
    "topk_indices": [(64, 8192, "normal", 2048), (1024, 8192, "normal", 512)],
}
# Of these there is no reference on a GPU by itself: ours stands in its place.
KERNEL_ALONE = {"sparse_mla_attention"}


def missing() -> list[str]:
    """Names of the libraries that are not installed, and those that cannot be imported, with the reason."""
    names = []
    for library in LIBRARIES:
        try:
            if library.load() is None:
                names.append(f"{library.name}: not installed")
        except Exception as error:
            names.append(f"{library.name}: failed: {reason(error)}")
    return names


def outcomes(ops: Iterable[str] = ()) -> Iterator[tuple[str, str, str, str]]:
    """(op, shape, peer, "ok" or what is wrong) of every peer of every case, of these ops or of all."""
    for op in ops or SHAPES:
        for shape in SHAPES[op]:
            try:
                yield from _of(op, shape)
            except Exception as error:  # of ours, or of what makes the inputs: the other cases are probed all the same
                yield op, str(shape), cases.OURS, f"failed: {reason(error)}"
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _of(op: str, shape: tuple) -> Iterator[tuple[str, str, str, str]]:
    torch.manual_seed(0)
    case = cases.load(op).case(*shape)
    peers = [name for name in case.calls if name != cases.OURS and name not in case.baselines | case.yardsticks]
    expected = None
    if peers and op not in KERNEL_ALONE:
        with dsa.use_backend("reference"):
            expected = case.calls[cases.OURS][0]()
    why = case.tried(expected)
    for name in dict.fromkeys((*peers, *why)):
        yield op, case.name, name, why.get(name, "ok")


def main(ops: Sequence[str] = ()) -> int:
    """Prints a line for each; 1 if something is wrong."""
    if unknown := set(ops) - SHAPES.keys():
        raise ValueError(f"ops: must be of {', '.join(SHAPES)}, got {', '.join(sorted(unknown))}")
    wrong = 0
    for line in missing():
        print(line)
        wrong += "failed" in line
    for op, shape, name, outcome in outcomes(ops):
        print(f"{name:<28} {op:<30} {shape:<58} {outcome}", flush=True)
        wrong += outcome != "ok"
    return 1 if wrong else 0
