"""Sparse prefill called through FlashMLA's signature (`dsa.compat.flash_mla`), at sizes of FlashMLA's own tests."""

import math

import pytest
import torch

from dsa.compat import flash_mla
from tests.gpu.attention import case_of
from tests.gpu.case_checks import by_sizes, grid

CASE = case_of("flash_mla_sparse_fwd")
COUNTS, SHAPES = (1, 62, 213), {"heads": (64, 128), "d": (512, 576), "counted": (False, True), "sink": (False, True)}


@by_sizes(grid(**SHAPES))
@pytest.mark.parametrize(
    ("tokens", "keys", "top_k", "invalid"),
    [
        *((tokens, *some, 0.1) for tokens in COUNTS for some in ((128, 128), (592, 128), (1592, 384), (1521, 512))),
        *((tokens, *some, 0.4) for tokens in COUNTS for some in ((95, 128), (114, 384))),
        *((1234, 4321, 4096, 0.5), (1024, 64, 8192, 0.5)),
    ],
)
def test_sparse_prefill_is_right(sizes, tokens, keys, top_k, invalid, record_error):
    shape = {"tokens": tokens, "keys": keys, "top_k": top_k, "invalid": invalid, "scale": 0.05}
    given = CASE.arguments("cuda", **sizes, **shape)
    if sizes["sink"]:
        given["attn_sink"][::3], given["attn_sink"][1::3] = math.inf, -math.inf
    options = {name: given[name] for name in ("sm_scale", "attn_sink", "topk_length")}
    options["out"] = torch.empty(tokens, 136, 512, dtype=torch.bfloat16, device="cuda")[:, : sizes["heads"]]
    found = flash_mla.flash_mla_sparse_fwd(given["q"], given["kv"], given["indices"], **options)
    assert found[0] is options["out"]
    record_error(CASE.check(given, found))
