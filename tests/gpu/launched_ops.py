"""Record the ops that run their kernels, and not their references, in a test."""

import pytest

from dsa.runtime import backends
from dsa.runtime.op import forget_calls


def launched_ops(patch: pytest.MonkeyPatch) -> set[str]:
    """Return a set that gets the name of every op that runs a kernel while the patch lasts."""
    names, runs_kernel = set(), backends.runs_kernel

    def spy(op, *asked):
        if answer := runs_kernel(op, *asked):
            names.add(op)
        return answer

    forget_calls()  # a recorded call launches its kernel without calling runs_kernel
    patch.setattr(backends, "runs_kernel", spy)
    return names
