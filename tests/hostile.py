"""Index tensors with hostile contents: whatever they hold, an op reads and writes inside its tensors, and the rows that
a wrong number does not concern have their right results.

tests/ops/test_hostile_contents.py runs them on the references, tests/gpu/test_hostile_contents.py on the kernels, where
compute-sanitizer watches.
"""

import torch

from dsa.cases import CASES
from dsa.cases.case import Case, changed, same_bits

# Ops in plain PyTorch on every device, which read their integers on the host.
IN_PYTORCH = ("compress_kv", "fp4_block_scales", "widen_fp4")
# (case, argument), with more words where one argument has several.
ARGUMENTS = [(case, name) for case in CASES for name in case.hostile]


def check(case: Case, name: str, device: str) -> int:
    """Every change of one argument; AssertionError where a result that should be right is not. How many there were."""
    hostile, argument = case.hostile[name], name.split()[0]

    def given() -> dict:
        return case.arguments(device, **hostile.sizes)

    expected, count = [x.clone() for x in case.results(given())], 0
    for what, tensor, kept in changed(hostile, given(), argument):
        count += 1
        where = f"{case.name}, {name}: {what}"
        try:
            results = case.results(given() | {argument: tensor})
        except ValueError as error:
            # Where contents can be looked at they may be refused, by the argument's name.
            assert device == "cpu" or case.op in IN_PYTORCH, f"{where}: {error}"
            assert str(error).startswith(f"{argument}: "), f"{where}: {error}"
            continue
        if device == "cuda":
            torch.cuda.synchronize()
        for i, (got, right) in enumerate(zip(kept(results), kept(expected), strict=True)):
            assert _same(got, right, hostile.exact), f"{where}: result {i} is not what it is without the wrong number"
    return count


def _same(got: torch.Tensor, right: torch.Tensor, exact: bool) -> bool:
    if exact or got.shape != right.shape:
        return same_bits(got, right)
    return torch.allclose(got.double(), right.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
