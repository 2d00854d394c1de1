"""Small valid calls of every public op, with all of their arguments, that run on a CPU in about a millisecond and on
Hopper through the kernels; and what each op promises to return.

A module a family, as in dsa.ops. `CALLS` is for tests of whichever op: of defaults that torch can change, and of wrong
arguments.
"""

from tests.valid_calls import cache, elementwise, gemm, indexer, mla, moe, training
from tests.valid_calls.description import ValidCall

__all__ = ["CALLS", "NOT_OPS", "ValidCall"]

# Public names that are not ops.
NOT_OPS = {"FlashMLASchedMeta", "backend", "num_sms", "use_backend"}

CALLS: list[ValidCall] = [
    call for family in (cache, elementwise, gemm, indexer, mla, moe, training) for call in family.CALLS
]
