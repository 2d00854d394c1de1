"""Plans of decoding in the old and in the new style, of this library and of others, without a GPU."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from tests.reference.common import assert_refused, i32


def test_new_style():
    meta, splits = get_mla_metadata()
    assert isinstance(meta, FlashMLASchedMeta) and splits is None
    assert not meta.have_initialized
    assert get_mla_metadata()[0] is not meta


def test_old_style_by_position_and_by_name():
    # one part: sequences 0 to 2 inclusive, to the end; none is split
    by_position = get_mla_metadata(i32([5, 0, 130]), 128, 1)
    by_name = get_mla_metadata(
        cache_seqlens=i32([5, 0, 130]),
        num_q_tokens_per_head_k=128,
        num_heads_k=1,
        num_heads_q=128,
        is_fp8_kvcache=True,
        topk=2048,
    )
    for metadata, splits in (by_position, by_name):
        assert metadata.tolist() == [[0, 0, 2, 2**30, 0, -1, 0, 0]] and metadata.dtype == torch.int32
        assert splits.tolist() == [0, 0, 0, 0] and splits.dtype == torch.int32
    assert get_mla_metadata(i32([]), 1, 1)[1].tolist() == [0]


def test_a_plan_is_made_without_numbers_from_the_host():
    """Their copy would make the host wait for the device."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            assert name in ("zeros", "select", "fill_"), name
            return function(*args, **(kwargs or {}))

    lengths = i32([5, 0, 130])
    with Copies():
        get_mla_metadata(lengths, 128, 1, topk=2048)


def decode(meta, splits=None, batch=2, s_q=1, topk=3):
    q, cache = torch.randn(batch, s_q, 2, 8), torch.randn(4, 2, 1, 8)
    indices = torch.zeros(batch, s_q, topk, dtype=torch.int32)
    return flash_mla_with_kvcache(q, cache, None, None, 4, meta, splits, indices=indices)


def test_a_plan_of_the_new_style_is_bound_to_the_shapes_of_its_first_call():
    meta, splits = get_mla_metadata()
    decode(meta, splits)
    assert meta.have_initialized
    decode(meta, splits)
    decode(None)
    decode(*get_mla_metadata(i32([3, 3]), 2, 1))
    for other in ({"batch": 1}, {"s_q": 2}, {"topk": 4}):
        assert_refused("tile_scheduler_metadata: was first used with .* get a new one", decode, meta, **other)


def test_an_object_of_another_class_keeps_its_fields_and_a_plan():
    @dataclasses.dataclass
    class Theirs:
        have_initialized: bool = False
        config: object = None
        tile_scheduler_metadata: torch.Tensor | None = None
        num_splits: torch.Tensor | None = None

    for meta in (Theirs(), Theirs(True, "theirs", i32([[9] * 8]), i32([9] * 3))):
        before = dict(vars(meta))
        decode(meta)
        decode(meta)
        assert {name: value for name, value in vars(meta).items() if name in before} == before
        assert_refused("tile_scheduler_metadata: was first used with", decode, meta, batch=1)
    frozen = dataclasses.make_dataclass(
        "Frozen", [(f.name, object, None) for f in dataclasses.fields(Theirs)], frozen=True
    )
    assert_refused("must be an object that takes attributes, in which a plan can be kept, got Fro", decode, frozen())


PLAN, SPLITS = torch.zeros(1, 8, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (get_mla_metadata, (torch.tensor([1]), 1, 1), "cache_seqlens: dtype must be int32, got int64"),
        (get_mla_metadata, (i32([1]), 1, 0), "num_heads_k: must be at least 1, got 0"),
        (decode, (PLAN, SPLITS[:2]), r"num_splits: shape must be \[3\], got \[2\]"),
        (decode, (PLAN, None), r"num_splits: must be a torch.Tensor, got NoneType"),
        (decode, (PLAN[:, :7], SPLITS), r"tile_scheduler_metadata: shape must be \[num_sm_parts, 8\], got \[1, 7\]"),
        (decode, (FlashMLASchedMeta(), SPLITS), "num_splits: must be None with a FlashMLASchedMeta, got Tensor"),
        (decode, ("plan",), "tile_scheduler_metadata: must be a FlashMLASchedMeta, .* got str"),
    ],
)
def test_wrong_plans_are_named(function, arguments, message):
    assert_refused(message, function, *arguments)
