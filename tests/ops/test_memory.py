"""Arguments in memory layouts that kernels cannot read. The arguments in REFUSED raise an error that names them. All
other arguments are accepted in any layout: the op copies them if the kernel cannot read them."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from dsa.cases import CASES


class Refused(NamedTuple):
    """Names of arguments, or of tensors in them, by the layout that the kernels require.

    aligned     the last dimension contiguous, rows or the whole tensor at multiples of 16 bytes
    contiguous  contiguous, at any address
    inner       the last dimension contiguous
    """

    aligned: str = ""
    contiguous: str = ""
    inner: str = ""


RANGES = "kv[1] cu_seq_len_k_start cu_seq_len_k_end"
REFUSED = {
    "write_indexer_cache": Refused("k cache", "slots"),
    "read_indexer_cache": Refused("cache", "slots"),
    "read_indexer_cache into k": Refused("cache k", "slots"),
    **{f"write_kv_cache {kind}": Refused("kv cache", "slots") for kind in ("float", "v32", "v4")},
    **{f"read_kv_cache {kind}": Refused("cache", "slots") for kind in ("float", "v32", "v4")},
    **{f"write_mla_cache {kind}": Refused("kv norm_weight cache out", "slots") for kind in ("float", "v32", "v4")},
    "write_compressed_kv": Refused(
        "kv gate ape state norm_weight cos sin cache", "slots cu_seqlens starts state_slots"
    ),
    "slot_mapping": Refused(),
    "rms_norm": Refused("x weight"),
    "rms_norm_rotary": Refused("x weight cos sin"),
    "rms_norm_cast_to_fp8": Refused("x weight"),
    "add_rms_norm_cast_to_fp8": Refused("x residual weight"),
    "apply_rotary": Refused(inner="x"),
    "apply_rotary into out": Refused(inner="x out"),
    "hyper_collapse": Refused("streams mix base", "scale"),
    "hyper_collapse_independent": Refused("streams mix base", "scale"),
    "hyper_expand": Refused("y streams post comb"),
    "hyper_mix": Refused("streams parts"),
    "hyper_collapse_norm_cast_to_fp8": Refused("streams mix base weight", "scale"),
    "hyper_collapse_independent_norm_cast_to_fp8": Refused("streams mix base weight", "scale"),
    "hyper_expand_mix": Refused("y streams post comb parts"),
    "hyper_head": Refused("streams mix base"),
    "per_token_cast_to_fp8": Refused("x"),
    "scatter_cast_to_fp8": Refused("x"),
    "rotary_cast_to_fp8": Refused("x cos sin"),
    "swiglu_cast_to_fp8": Refused("gate up"),
    "gate_cast_to_fp8": Refused("gate x"),
    "fp8_gemm_nt": Refused("b[0]"),
    "grouped_fp8_gemm_nt": Refused("b[0]"),
    "grouped_fp8_gemm_swiglu": Refused("b[0]"),
    "grouped_fp8_fp4_gemm_nt": Refused("b[0] b[1]"),
    "grouped_fp8_fp4_gemm_swiglu": Refused("b[0] b[1]"),
    "linear_fp32": Refused("x weight"),
    "quantize_indexer_queries": Refused("q", inner="weights"),
    "write_indexer_keys": Refused("k norm_weight norm_bias cache", "slots"),
    "fp8_mqa_logits": Refused("q kv[0]", RANGES, "weights"),
    "get_paged_mqa_logits_metadata": Refused(),
    "fp8_paged_mqa_logits": Refused("q kv_cache", "schedule_meta", "weights context_lens block_table"),
    "indexer_select paged": Refused("q kv[0]", RANGES, "weights block_table"),
    "paged_indexer_select of slots": Refused("q kv_cache", "", "weights block_table"),
    "topk_indices paged": Refused(inner="scores block_table"),
    "topk_indices into out": Refused(inner="scores out"),
    "flash_mla_sparse_fwd into out": Refused("kv out"),
    "flash_mla_with_kvcache dense into out": Refused("k_cache out", "", "block_table"),
    "flash_mla_with_kvcache old plan": Refused("k_cache", "tile_scheduler_metadata num_splits", "block_table"),
    "flash_mla_with_kvcache sparse": Refused("k_cache extra_k_cache"),
    "flash_mla_with_kvcache v32 into out": Refused("k_cache extra_k_cache out"),
    "flash_mla_with_kvcache v4": Refused("k_cache extra_k_cache"),
    "sliding_window_attention listed": Refused("kv"),
    "window_sparse_attention listed": Refused("kv compressed"),
    "window_attention_cast_to_fp8": Refused("kv compressed"),
    "sliding_window_decode": Refused("cache"),
    "sliding_window_decode ring": Refused("cache"),
    "mha_varlen_fwd": Refused(),
    "selection_bits": Refused(inner="indices"),
    "window_indices": Refused(),
    "window_slots": Refused(),
    "merge_attention": Refused("outs[0] outs[1]"),
    "mla_absorb_queries": Refused("q_nope q_pe kv_b[0]", inner="cos sin kv_b[1]"),
    "mla_values_cast_to_fp8": Refused("attended kv_b[0]", inner="kv_b[1]"),
    "moe_gate": Refused(),
    "sort_by_expert": Refused(),
    "combine_experts": Refused("y shared residual"),
    "route_to_experts": Refused("x weight"),
    "route_by_table": Refused("x weight"),
    "sparse_mla_attention": Refused("kv"),
    "sparse_indexer_loss": Refused("kv k_idx"),
}


def apart(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)


def wider(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., : x.shape[-1]].copy_(x)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def columns(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


# Functions that return a tensor in an unusual layout. For each, the fields of `Refused` whose arguments the op refuses
# in this layout.
WAYS = {apart: Refused._fields, columns: Refused._fields, wider: ("aligned", "contiguous"), shifted: ("aligned",)}


def parts(arguments: dict[str, Any]) -> Iterator[tuple[str, str, int | None, torch.Tensor]]:
    """Yield (name in messages, argument, index in the argument or None, tensor) for each tensor."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, name, None, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", name, i, x) for i, x in enumerate(value) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [call for call in CASES if call.name in REFUSED], ids=lambda call: call.name)
def test_what_kernels_do_not_read_is_refused_and_nothing_else(call, way, launches):
    asked = REFUSED[call.name]
    refusing = " ".join(getattr(asked, field) for field in WAYS[way]).split()
    for called, name, place, x in parts(call.arguments()):
        if x.dim() < 2 and way in (wider, columns):
            continue
        arguments = call.arguments()
        value = arguments[name]
        arguments[name] = way(x) if place is None else type(value)([*value[:place], way(x), *value[place + 1 :]])
        if called not in refusing:
            call.run(arguments)
            continue
        with pytest.raises(ValueError, match=f"^{re.escape(called)}: .*(contiguous|multiples? of 16 bytes|mergeable)"):
            call.run(arguments)


@pytest.mark.parametrize("call", [call for call in CASES if call.name in REFUSED], ids=lambda call: call.name)
def test_rows_that_kernels_can_read_are_not_copied(call, launches):
    """The rows are slices of a wider tensor, with a stride that is a multiple of 16 bytes. If the kernel needs a
    contiguous tensor, the op may refuse them."""
    for called, name, _, x in parts(call.arguments()):
        if called != name or called not in REFUSED[call.name].aligned.split() or x.dim() < 2:
            continue
        rows = x.new_empty(*x.shape[:-1], x.shape[-1] + 16)[..., : x.shape[-1]].copy_(x)
        try:
            call.run(call.arguments() | {name: rows})
        except ValueError as error:
            assert re.match(f"{name}: .*(contiguous|mergeable)", str(error))
            continue
        given = [x for _, found in launches for *_, x in parts(dict(enumerate(found)))]
        assert any(x.data_ptr() == rows.data_ptr() for x in given), name


# Arguments that are cut to one token, sequence or page, and get an arbitrary stride in this dimension.
SINGLE = {
    "write_indexer_cache": "k k_scale slots",
    "write_kv_cache float": "kv cache slots",
    "write_kv_cache v32": "kv cache slots",
    "read_kv_cache v4": "cache",
    "write_mla_cache v32": "kv cos sin cache slots out",
    "rms_norm": "x",
    "rms_norm_cast_to_fp8": "x",
    "hyper_collapse": "streams mix",
    "hyper_collapse_independent": "streams mix",
    "hyper_expand": "y streams post comb",
    "hyper_mix": "streams",
    "hyper_collapse_norm_cast_to_fp8": "streams mix",
    "hyper_collapse_independent_norm_cast_to_fp8": "streams mix",
    "hyper_expand_mix": "y streams post comb",
    "per_token_cast_to_fp8": "x",
    "quantize_indexer_queries": "q weights cos sin",
    "fp8_paged_mqa_logits": "kv_cache",
    "flash_mla_with_kvcache sparse": "k_cache extra_k_cache",
    "flash_mla_with_kvcache old plan": "k_cache",
    "merge_attention": "outs lses",
    "route_to_experts": "x",
}


def single(x: Any) -> Any:
    """Return the first row of x, or of each tensor of a list. In dimensions of size 1, its strides are not multiples of
    16 bytes."""
    if isinstance(x, list):
        return list(map(single, x))
    odd = torch.empty(x[:1].numel() + 7, dtype=x.dtype)[: x[:1].numel()].view(x[:1].shape).copy_(x[:1])
    strides = [odd.numel() + 7 if size == 1 else stride for size, stride in zip(odd.shape, odd.stride())]
    return odd.as_strided(odd.shape, strides)


@pytest.mark.parametrize("call", [call for call in CASES if call.name in SINGLE], ids=lambda call: call.name)
def test_strides_of_single_elements_mean_nothing(call, launches):
    """The kernels read 16 bytes at a time. So the op replaces strides of dimensions of size 1 by multiples of 16
    bytes."""
    arguments = call.arguments()
    arguments |= {name: single(arguments[name]) for name in SINGLE[call.name].split()}
    call.run(arguments)
    aligned = {x.data_ptr() for called, *_, x in parts(arguments) if called in REFUSED[call.name].aligned.split()}
    given = [x for _, found in launches for *_, x in parts(dict(enumerate(found))) if x.data_ptr() in aligned]
    assert given
    for x in given:
        assert not any(stride * x.element_size() % 16 for stride in x.stride()[:-1])
