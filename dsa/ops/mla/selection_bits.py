"""Convert lists of selected keys to bits, one bit per key."""

import torch

from dsa.reference.mla import selection_bits as reference
from dsa.runtime.declare import INT32, Arguments, Int, Tensor, op

__all__ = ["selection_bits"]

SELECTION_BITS = Arguments(
    indices=Tensor("T k", INT32, layout="the last dimension contiguous"),
    starts=Tensor("T", INT32, optional=True),
    max_keys=Int(least=0),
)


def selection_bits(indices: torch.Tensor, starts: torch.Tensor | None, max_keys: int) -> torch.Tensor:
    """bits[t, 4 b + c], bit 2 i + j: whether indices[t] contains the key starts[t] + 128 b + 8 i + 2 c + j.

    indices   [T, k] int32: rows of the keys that query t selects, in any order. Negative indices are ignored, and so
              are indices outside [starts[t], starts[t] + max_keys)
    starts    [T] int32: the row of the first key of each query's sequence. None: indices count from that row, as those
              of `topk_indices` do
    max_keys  keys of the longest sequence, at least 0

    Returns int32 [T, 4 * ceil(max_keys / 128)], contiguous: the argument `selected` of `mha_varlen_fwd`. In a block of
    128 keys, the kernel of `mha_varlen_fwd` computes 32 keys per thread, and a word contains the bits of these 32 keys.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel, rows of indices contiguous. Deterministic. CUDA-graph safe, no host synchronisation.
    """
    return _selection_bits(indices, starts, max_keys)


def _results(indices: torch.Tensor, max_keys: int) -> torch.Tensor:
    return indices.new_empty(len(indices), -(-max_keys // reference.KEYS) * reference.WORDS)


@op(
    arguments=SELECTION_BITS,
    reference=reference.selection_bits,
    results=_results,
)
def _selection_bits(indices: torch.Tensor, starts: torch.Tensor | None, max_keys: int) -> torch.Tensor:
    from dsa.kernels.mla.selection_bits_sm90 import compile_selection_bits

    bits = _results(indices, max_keys)
    if bits.numel():
        compile_selection_bits(starts is not None)(indices, starts, bits, max_keys)
    return bits
