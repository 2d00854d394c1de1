"""paged_indexer_select on the GPU has the bits of fp8_paged_mqa_logits and topk_indices."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.selection import require_two_paged_ops
from tests.gpu.indexer.scored_keys import INT_MAX, KINDS, KeysInPages, Op

CASE = cases_of("paged_indexer_select")[0]
OPTIONS = [(1, False), (100, True), (2048, False), (2048, True), (4096, True)]


def check(given, found):
    require_two_paged_ops(given, found)
    assert torch.equal(dsa.paged_indexer_select(**given | {"return_values": False}), found[0])


@pytest.fixture(params=OPTIONS, ids=str)
def op(request):
    return Op(CASE, check, dict(zip(("top_k", "slots"), request.param)))


class TestKeysInPages(KeysInPages):
    """Run the shared tests with every entry of OPTIONS."""


def test_more_columns_than_the_table_has(op):
    given = op.pages((1000, 500, 70), KINDS[1])
    op.verify(given, block_table=given["block_table"][:, :3].clone(), max_context_len=INT_MAX)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("share", [1.0, 0.001, 0.0], ids=lambda share: f"{share:.1%} are not zero")
def test_equal_scores_and_zeros(op, share, sign):
    given, one = op.pages((50000, 3000, 2048), KINDS[0]), torch.zeros(128, device="cuda")
    one[0], pages = 1.0, given["kv_cache"].view(len(given["kv_cache"]), -1)
    scales = torch.rand(len(pages), 64, device="cuda") * (torch.rand(len(pages), 64, device="cuda") < share)
    pages[:, : 64 * 128] = one.to(torch.float8_e4m3fn).view(torch.uint8).repeat(64)
    pages[:, 64 * 128 :] = (scales if share < 1 else torch.ones_like(scales)).view(torch.uint8)
    given["q"] = one.expand(given["q"].shape).to(torch.float8_e4m3fn).contiguous()
    given["weights"] = sign * torch.eye(64, device="cuda")[:1].expand(given["weights"].shape).contiguous()
    op.verify(given)


def test_nan_is_never_selected():
    op = Op(CASE, check, {"top_k": 200})
    given = op.pages((200, 4000), KINDS[1])
    raw, page = given["kv_cache"].view(len(given["kv_cache"]), -1), given["block_table"].tolist()
    raw[page[0][1], 13 * 128] = 0x7F  # key 77 of the first sequence
    raw[page[1][2], 64 * 128 + 4 * 22 : 64 * 128 + 4 * 23] = 0xFF  # the scale of key 150 of the second sequence
    op.verify(given)
    first = CASE.run(given)[0][:2]
    assert not first.eq(77).any() and first.ge(0).sum(1).tolist() == [198, 199]
    given["q"].view(torch.uint8)[1, 1, 3, 5] = 0x7F  # makes all scores of query 1 of sequence 1 NaN
    op.verify(given)
    assert CASE.run(given)[0][3].eq(-1).all()
