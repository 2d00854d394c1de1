"""Check ops with hostile contents in index tensors: wrong indices, lengths and bounds.

Whatever an index tensor contains, the op must read and write only inside its tensors. If one number is wrong, results
that do not depend on this number must be right. tests/ops/test_hostile_contents.py checks the references, and
tests/gpu/test_hostile_contents.py checks the kernels under compute-sanitizer.
"""

import torch

from dsa.cases import CASES
from dsa.cases.case import Case, changed, same_bits

# Ops that run in PyTorch on every device and read their integers on the host. Only they can refuse contents on a GPU.
IN_PYTORCH = ("compress_kv", "fp4_block_scales", "widen_fp4")
# (case, key of case.hostile). A key begins with an argument's name. If the argument has several entries, further words
# follow.
ARGUMENTS = [(case, name) for case in CASES for name in case.hostile]


def check(case: Case, name: str, device: str) -> int:
    """Run the case with each hostile change of one argument. Return the number of changes.

    The op must not refuse the contents, except on a CPU or in PyTorch, with a message about the argument. A result that
    the change cannot affect must stay the same.
    """
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
