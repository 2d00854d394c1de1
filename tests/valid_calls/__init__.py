"""Small valid calls of every public op, with all of their arguments, that run on a CPU in about a millisecond and on
Hopper through the kernels; and what each op promises to return.

`CALLS` is for tests of whichever op: of defaults that torch can change, and of wrong arguments.
"""

from tests.valid_calls import attention, indexer, inputs
from tests.valid_calls.description import ValidCall

__all__ = ["CALLS", "NOT_OPS", "ValidCall"]

# Public names that are not ops.
NOT_OPS = {"FlashMLASchedMeta", "backend", "num_sms", "use_backend"}

CALLS: list[ValidCall] = [*attention.CALLS, *indexer.CALLS, *inputs.CALLS]
