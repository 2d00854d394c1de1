"""The reference of write_mla_cache: the channels of a small model, and NaN."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.cases.case import Maker
from dsa.reference import write_mla_cache
from tests.reference.common import BF16, F16, F32, NAN

CASE = cases_of("mla_cache_inputs")[0]


@pytest.mark.parametrize("eps", [1e-6, 0.7])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_a_small_model_has_other_channels(dtype, interleaved, eps):
    options = {"eps": eps, "interleaved": interleaved, "kept": False}
    given = CASE.arguments(tokens=3, d=48, pages=3, page_size=4, dtype=dtype, **options)
    CASE.check_call(given | {"norm_weight": 1 + 0.3 * torch.randn(32), **Maker().angles(3, 16)})


def test_nan_stays_in_its_row_and_part():
    given = CASE.arguments(tokens=2)
    given["kv"][0, 3] = given["kv"][1, 575] = NAN
    write_mla_cache(**given)
    assert given["out"][0, :512].isnan().all() and not given["out"][0, 512:].isnan().any()
    assert given["out"][1].isnan().nonzero()[:, 0].tolist() == [574, 575]
