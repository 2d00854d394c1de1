"""write_compressed_kv on the GPU: every kind of entry and cache layout, prompts in chunks and single tokens. The bits
do not depend on how a sequence is divided into passes."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.cache import slot_bytes
from tests.gpu.attention import replayed
from tests.gpu.case_checks import by_sizes, check_layouts, verify
from tests.gpu.op_checks import assert_same_bits

CASE = cases_of("compressed_kv")[2]
# (channels of an entry, tokens per block, whether blocks overlap, the cache's layout)
KINDS = [
    dict(zip(("d", "m", "overlap", "layout"), kind, strict=True))
    for kind in (
        *((512, 4, True, "bfloat16"), (512, 4, True, "v4"), (512, 128, False, "bfloat16"), (512, 128, False, "v4")),
        *((128, 4, True, "bfloat16"), (128, 4, True, "index"), (512, 4, True, "float32"), (512, 128, False, "float16")),
    )
]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# A pass is one call of the op: (new tokens of each sequence, earlier tokens of each sequence).
PASSES = [
    ([300, 5, 131], [0, 0, 0]),
    ([1, 1, 1], [300, 5, 131]),
    ([3, 0, 260], [301, 6, 132]),
    ([0, 123, 1], [304, 6, 392]),
    *(([1, 1, 1], [304 + i, 129 + i, 393 + i]) for i in range(6)),
    ([130, 128, 2], [310, 135, 399]),
    ([5001], [0]),
    ([2047], [5001]),
]
# Passes with more sequences than a warp has lanes.
SOME, ONE = [7 * i % 12 for i in range(70)], [1] * 70
MANY = [(SOME, [0] * 70), (ONE, SOME), ([2] * 70, SOME)]
# Passes that begin up to three tokens before the end of the previous pass, as after rejected drafts.
DRAFTS = [([4, 4, 4], [304 - back, 11 - back, 135 - back]) for back in (0, 1, 2, 3)]


@by_dtype
@by_kind
@by_sizes(
    [{"lengths": lengths, "starts": starts} for lengths, starts in (*PASSES, *MANY)],
    [{"lengths": lengths, "starts": starts, "spare": 2} for lengths, starts in DRAFTS],
)
def test_every_pass_is_right(sizes, kind, dtype, record_error):
    verify(CASE, sizes | kind | {"dtype": dtype}, record_error)


@by_kind
def test_one_token_takes_all_the_weight(kind):
    """The softmax weights of the other tokens underflow to 0. If the kernel did not subtract the largest gate, its
    exponential would be infinite."""
    m = kind["m"]
    given = CASE.arguments("cuda", lengths=[2 * m], starts=[0], dtype=torch.float32, **kind)
    given["gate"].zero_()
    given["ape"].zero_()
    given["gate"][m + 1] = 1e4
    CASE.check_call(given)


@by_kind
@by_dtype
def test_layouts_change_no_bit(kind, dtype):
    check_layouts(CASE, ("kv", "gate"), lengths=[3, 130, 1], starts=[130, 7, 2], dtype=dtype, **kind)


@by_dtype
@by_kind
def test_an_entry_does_not_depend_on_its_pass(kind, dtype):
    """Compute two prompts in passes of `step` tokens, with `together` prompts in each call."""
    length, found = 300 if kind["m"] == 128 else 75, []
    for step, together in ((length, 2), (length, 1), (128, 2), (5, 2), (1, 2), (1, 1)):
        given = CASE.arguments("cuda", lengths=[length] * 2, starts=[0] * 2, dtype=dtype, **kind)
        given["state"].zero_()
        for low in range(0, length, step):
            new = range(low, min(low + step, length))
            for first in range(0, 2, together):
                rows = torch.tensor([b * length + t for b in range(first, first + together) for t in new]).cuda()
                part = {name: given[name][rows] for name in ("kv", "gate", "cos", "sin", "slots")}
                part["cu_seqlens"] = given["cu_seqlens"][: together + 1] // length * len(new)
                part["starts"] = given["starts"][:together] + low
                part["state_slots"] = given["state_slots"][first : first + together].clone()
                dsa.write_compressed_kv(**given | part)
        found.append((slot_bytes(given["cache"], kind["layout"] == "index"), given["state"]))
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5]], ids=str)
def test_a_graph_follows_new_positions(kind):
    """`starts` decides whether a sequence's new token completes a block. A graph that kept the captured starts would
    write entries for wrong tokens."""
    held, *renewals = (
        CASE.arguments("cuda", step, lengths=[1] * 5, starts=[step + start for start in (5, 1, 2, 3, 4)], **kind)
        for step in range(10)
    )
    for results, new in zip(replayed(lambda: CASE.results(held), held, renewals), renewals, strict=True):
        CASE.check(new, results)


@pytest.mark.parametrize("pages", [40, 0])
@by_kind
def test_the_state_is_written_without_a_slot(kind, pages):
    given = CASE.arguments("cuda", lengths=[140, 9, 130], starts=[0, 0, 0], **kind)
    given["slots"][given["slots"] >= 0] = 40 * 64 + 5
    CASE.check_call(given | {"cache": given["cache"][:pages]})
