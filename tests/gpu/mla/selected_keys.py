"""Tests that every op that attends to lists of selected keys must pass. The test file of each op subclasses
SelectedKeys and defines a fixture `op`, which returns an Op."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from dsa.cases.attention import all_rows
from dsa.cases.case import Case, Given
from tests.gpu.attention import D_V, INF, NAN, SINKS, assert_writes_a_part, checked, int32, no_keys, spoiled
from tests.gpu.mla.caches import garbage, slots_of
from tests.gpu.op_checks import assert_equal, assert_rows_stand_alone, assert_same_bits

PER_QUERY = "q", "indices", "topk_length"
ALONE = [slice(row, row + 1) for row in range(290, 300)]
LENGTHS = [0, 1, 2, 63, 64, 65, 128, 500, 999, 1000, 1001, 2**31 - 1, -1, -(2**31)]


@dataclass(frozen=True)
class Op:
    """A case of an op, and how the tests make arguments for the op. In decoding, each sequence has one query.

    make       (tokens, heads, keys, top_k, **options) -> arguments, with the keys in a cache whose other rows are NaN
    heads      number of query heads
    invariant  options with which the bits of a query's results do not depend on other queries
    """

    case: Case
    make: Callable[..., Given]
    heads: int
    invariant: Given = field(default_factory=dict)

    def inputs(self, tokens, keys, top_k, **options):
        return self.make(tokens, self.heads, keys, top_k, **options)

    def run(self, given):
        return by_query(self.case.run(given))

    def checked(self, given, record_error=None):
        return by_query(checked(self.case, given, record_error))


def with_nan_rows(given):
    """Return arguments of prefill with a row of NaN after each row of kv."""
    kv = torch.stack((given["kv"], torch.full_like(given["kv"], NAN)), 1).flatten(0, 1)
    return given | {"kv": kv, "indices": 2 * given["indices"]}


def by_query(found):
    """Return (out [T, H, 512], lse [T, H]) of prefill, or of decoding with one query per sequence."""
    out, *_, lse = found
    return (out[:, 0], lse[..., 0]) if out.dim() == 4 else (out, lse)


def cache_of(given):
    """Return the cache [pages, P, ...]; for prefill, kv as pages of one key."""
    return given["kv"][:, None] if "kv" in given else given["k_cache"]


def size(given):
    return cache_of(given).shape[0] * cache_of(given).shape[1]


class SelectedKeys:
    @pytest.mark.parametrize("lengths", [LENGTHS * 5, *([n] * 5 for n in (0, -5, 1000, 2**31 - 1))], ids=len)
    @pytest.mark.parametrize("top_k", [64, 1000, 1024])
    def test_keys_after_topk_length_are_not_looked_at(self, op, top_k, lengths, record_error):
        """Indices from topk_length on select keys that are NaN."""
        given = op.inputs(len(lengths), 3000, top_k) | {"topk_length": int32(lengths)}
        beyond = torch.arange(top_k, device="cuda") >= given["topk_length"][:, None, None]
        given["indices"].masked_fill_(beyond, slots_of(cache_of(given))[1][0].int())
        op.checked(given, record_error)

    @pytest.mark.parametrize(("tokens", "top_k"), [(50, 512), (1, 6000)])
    def test_sinks_scale_the_output_alone(self, op, tokens, top_k, record_error):
        given = op.inputs(tokens, 7000, top_k)
        given["indices"][3:4] = given["indices"][4:5, 0, 1:] = -1
        sinks = {"attn_sink": torch.tensor(SINKS, device="cuda").repeat(op.heads // len(SINKS))}
        (out, lse), (plain, plain_lse) = op.checked(given | sinks, record_error), op.run(given)
        if tokens > 1:  # with one query the keys are split, and a sink can change the rounding when splits are combined
            assert_equal((lse, out[:, 0]), (plain_lse, plain[:, 0]))
        assert not out[:, [1, 7]].any() and out[:3, 3].any()

    @pytest.mark.parametrize("invalid", [0.05, 0.5, 0.98, 1.0])
    def test_indices_that_are_no_keys_are_ignored(self, op, invalid, record_error):
        given = op.inputs(41, 2000, 1000)
        indices = given["indices"] = spoiled(given["indices"], size(given), invalid)
        indices[5], indices[8:16], indices[40] = -1, size(given), 2**31 - 1
        out, lse = (x[[5, *range(8, 16), 40]] for x in op.checked(given, record_error))
        assert not out.any() and lse.eq(INF).all()

    def test_tiles_without_keys_are_ignored(self, op, record_error):
        given, place = op.inputs(8, 4000, 640), torch.arange(640, device="cuda")
        tile = place // 64
        kept = [place == 639, place == 0, place == 320, tile == 9, tile == 0, tile == 5, tile % 2 == 0, tile % 2 == 1]
        bad = no_keys(size(given))[place % 6]
        op.checked(given | {"indices": torch.where(torch.stack(kept)[:, None], given["indices"], bad)}, record_error)

    def test_a_key_named_twice_counts_twice(self, op, record_error):
        given = op.inputs(40, 500, 256)
        indices = given["indices"]
        indices[0], indices[1:5, :, 128:] = indices[0, 0, 0].clone(), indices[1:5, :, :128]
        indices[6, 0, 3], indices[20, 0, 255] = indices[6, 0, 200], indices[20, 0, 0]
        op.checked(given, record_error)

    def test_keys_that_no_query_selects_change_no_bit(self, op):
        given = op.inputs(30, 2000, 500)
        clean, cache = op.checked(given), cache_of(given)
        for _ in garbage(cache, slots_of(cache)[1]):
            assert_same_bits(op.run(given), clean)

    @pytest.mark.parametrize("tokens", [6, 300])
    def test_nan_reaches_the_query_that_selects_it_alone(self, op, tokens):
        given = op.inputs(tokens, 2000, 300)
        clean = op.run(given)
        given["indices"][2, 0, 123] = slots_of(cache_of(given))[1][0]
        found, others = op.run(given), torch.arange(tokens, device="cuda") != 2
        assert found[0][2].isnan().all() and found[1][2].isnan().all()
        assert_same_bits([x[others] for x in found], [x[others] for x in clean])

    @pytest.mark.parametrize(("scale", "least"), [(1e-7, -INF), (0.01, -INF), (0.3, -INF), (10.0, 30), (2400.0, 5e3)])
    @pytest.mark.parametrize(("tokens", "top_k"), [(20, 1000), (1, 6000)])
    def test_logits_of_any_size_do_not_overflow(self, op, tokens, top_k, scale, least, record_error):
        """With the two large scales, exponentials would overflow if the maximum were not subtracted."""
        _, lse = op.checked(op.inputs(tokens, 7000, top_k, scale=scale), record_error)
        assert lse.min() > least

    def test_a_maximum_may_rise_from_tile_to_tile(self, op, record_error):
        """The maximum of a query's logits rises or falls by another amount in each head. Some amounts exceed the
        threshold for rescaling O. Rope channels set the logits, because they are not part of the values."""
        given = op.inputs(36, 1024, 1024)
        q, cache = given["q"].view(36, op.heads, -1), cache_of(given)
        if q.shape[2] == D_V or cache.dtype == torch.uint8:
            pytest.skip("needs rope channels apart from the values")
        slots, direction = slots_of(cache)[0], torch.randn(64, device="cuda").sign()
        of_head = torch.linspace(-1, 1, op.heads, device="cuda")[:, None] * direction
        q[..., D_V:] = torch.tensor([0.5, 3.0, 6.0, 20.0, 100.0, 0.0], device="cuda").repeat(6)[:, None, None] * of_head
        tile = torch.arange(1024, device="cuda")[:, None] // 64
        all_keys = cache.view(-1, q.shape[2])
        all_keys[slots, D_V:] = (tile * direction * q.shape[2] ** 0.5 / 64).to(cache.dtype)
        indices = given["indices"] = slots.int().expand(36, 1, -1).clone()
        # These lists begin with the first keys. Otherwise the lse of some heads would be near 0, where the relative
        # error of fp32 is large.
        indices[7::8, :, 700:] = indices[7::8, :, :324]
        indices[7::8, :, :700] = indices[6::8, :, 100:] = -1
        _, lse = op.checked(given, record_error)
        assert lse[3, -1] > 290 and lse[3, 0] < 20

    @pytest.mark.parametrize(("top_k", "place"), [(1, 0), (64, 63), (200, 131), (2000, 1999)])
    def test_one_key_gives_its_value_exactly(self, op, top_k, place):
        given = op.inputs(40, 2000, top_k)
        used = slots_of(cache_of(given))[0]
        keys = used[torch.randint(len(used), (10,), device="cuda")].repeat_interleave(4)
        given["indices"] = no_keys(size(given))[torch.randint(6, (40, 1, top_k), device="cuda")]
        given["indices"][:, 0, place] = keys.int()
        out, _ = op.checked(given)
        assert torch.equal(out, all_rows(cache_of(given))[keys, None, :D_V].expand_as(out).to(out.dtype))

    def test_queries_do_not_depend_on_each_other(self, op):
        given = op.inputs(300, 3000, 2048, **op.invariant)
        for lengths in (None, torch.randint(-5, 2100, (300,), dtype=torch.int32, device="cuda")):
            given["topk_length"] = lengths
            assert_rows_stand_alone(op.run, given, PER_QUERY, [torch.randperm(300).cuda(), slice(7), *ALONE])

    @pytest.mark.parametrize("invariant", [False, True])
    @pytest.mark.parametrize("tokens", [1, 200])
    def test_a_part_of_a_tensor_is_written(self, op, tokens, invariant):
        """If the cache has no keys, the op writes zeros to `out` and does not write the rest of the tensor."""
        given = op.inputs(tokens, 3000, 1000, sink=True, invariant=invariant)
        whole = assert_writes_a_part(op.case, given)
        out, name = whole[..., 1 : 1 + op.heads, :], "kv" if "kv" in given else "k_cache"
        op.case.run(given | {name: given[name][:0], "out": out})
        assert not out.any() and whole.isnan().sum() == whole.numel() - out.numel()
