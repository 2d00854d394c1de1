"""Which ops run kernels in a test."""

import pytest

from dsa.runtime import backends
from dsa.runtime.op import forget_calls


def launched_ops(patch: pytest.MonkeyPatch) -> set[str]:
    """A set into which every op goes that runs a kernel from now on."""
    names, runs_kernel = set(), backends.runs_kernel

    def spy(op, *asked):
        if answer := runs_kernel(op, *asked):
            names.add(op)
        return answer

    forget_calls()  # a known call launches without asking
    patch.setattr(backends, "runs_kernel", spy)
    return names
