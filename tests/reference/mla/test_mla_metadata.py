"""Plans of decoding without a GPU: plans in FlashMLA's old and new calling style, and plan objects whose class comes
from another library."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from tests.reference.common import INT32, assert_refused, i32, zeros

LENGTHS = i32([5, 0, 130])


def test_a_plan_of_the_new_style_is_a_new_object():
    meta, splits = get_mla_metadata()
    assert isinstance(meta, FlashMLASchedMeta) and splits is None
    assert not meta.have_initialized
    assert get_mla_metadata()[0] is not meta


NAMED = {"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 128, "num_heads_k": 1, "num_heads_q": 128}


@pytest.mark.parametrize(
    ("arguments", "options"), [((LENGTHS, 128, 1), {}), ((), NAMED | {"is_fp8_kvcache": True, "topk": 2048})]
)
def test_the_old_style_takes_positions_and_names(arguments, options):
    metadata, splits = get_mla_metadata(*arguments, **options)
    # One part covers sequences 0 to 2, and no sequence is split.
    assert metadata.tolist() == [[0, 0, 2, 2**30, 0, -1, 0, 0]] and metadata.dtype == INT32
    assert splits.tolist() == [0, 0, 0, 0] and splits.dtype == INT32


def test_a_plan_without_sequences():
    assert get_mla_metadata(i32([]), 1, 1)[1].tolist() == [0]


class Copies(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name in ("zeros", "select", "fill_"), name
        return function(*args, **(kwargs or {}))


def test_a_plan_copies_no_numbers_from_the_host():
    """A copy from the host would make the host wait for the device."""
    with Copies():
        get_mla_metadata(LENGTHS, 128, 1, topk=2048)


def decode(meta, splits=None, batch=2, s_q=1, topk=3):
    q, cache = torch.randn(batch, s_q, 2, 8), torch.randn(4, 2, 1, 8)
    return flash_mla_with_kvcache(q, cache, None, None, 4, meta, splits, indices=zeros(batch, s_q, topk, dtype=INT32))


@dataclasses.dataclass
class Theirs:
    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


@pytest.mark.parametrize("plan", [(None,), get_mla_metadata(i32([3, 3]), 2, 1)])
def test_calls_take_no_plan_and_plans_of_the_old_style(plan):
    decode(*plan)


@pytest.mark.parametrize("other", [{"batch": 1}, {"s_q": 2}, {"topk": 4}])
@pytest.mark.parametrize(
    "make", [FlashMLASchedMeta, Theirs, lambda: Theirs(True, "theirs", i32([[9] * 8]), i32([9] * 3))]
)
def test_a_plan_of_the_new_style_is_bound_to_the_shapes_of_its_first_call(make, other):
    """The op does not change the fields of another library's object."""
    meta = make()
    before = dict(vars(meta))
    decode(meta)
    decode(meta)
    assert isinstance(meta, FlashMLASchedMeta) or before.items() <= vars(meta).items()
    assert_refused("tile_scheduler_metadata: was first used with .* get a new one", decode, meta, **other)


def test_an_object_without_attributes_cannot_keep_a_plan():
    frozen = dataclasses.make_dataclass(
        "Frozen", [(f.name, object, None) for f in dataclasses.fields(Theirs)], frozen=True
    )
    assert_refused("must be an object that takes attributes, in which a plan can be kept, got Fro", decode, frozen())
