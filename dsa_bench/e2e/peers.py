"""A model's layers on the peers' kernels: while this lasts, the ops are theirs where they can be imported.

DeepGEMM gives the index scores and the FP8 linear layers, vLLM the top-k, FlashMLA the attention to selected keys, each
in the newest build that is installed: what engines run DeepSeek-V3.2 with. So selected keys are attended to in the
absorbed form, which is the only one that FlashMLA has; prompts all of whose keys count take the multi-head form by
PyTorch's FlashAttention 2, which takes a third of the absorbed form's multiply-adds. In V4's prefill the window's keys
and the compressed entries are put into one tensor for FlashMLA, where an engine has them. Experts are on DeepGEMM's
grouped products (peer_experts.py), and FP4 experts of decoding on vLLM's Marlin (peer_fp4_experts.py). No peer selects
as it scores, so scores and top-k are two ops for any number of keys and of sequences. Cache writers and all else stay
ours.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch

import dsa
from dsa_bench.e2e import peer_experts
from dsa_bench.e2e.peer_fp4_experts import forward_on_marlin
from dsa_bench.harness.calls import reason
from dsa_bench.peers import deep_gemm, flash_mla, marlin, operators
from dsa_bench.peers.package import Library, Operators
from dsa_layers.batch.group_rows import GroupRows
from dsa_layers.layers import attention, key_selection
from dsa_layers.layers.experts import Experts

Op = Callable[..., Any]
_NEVER = 2**31  # keys: more than any op takes
_flash_attention = torch.ops.aten._flash_attention_forward


@dataclass
class Replaced:
    """ops: the replaced ops -> the library that they are from. failed: libraries that could not be imported -> why."""

    ops: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def libraries(self) -> list[str]:
        return sorted(set(self.ops.values()))


@contextlib.contextmanager
def peer_kernels() -> Iterator[Replaced]:
    """Tells what is replaced: nothing, if no peer can be imported."""
    replaced = Replaced()
    names = ("topk_indices", "mha_varlen_fwd", *(name for _, ops in _GROUPS for name in ops))
    ours, form = {name: getattr(dsa, name) for name in names}, attention.multi_head_is_faster
    forward, fused = Experts.forward, (key_selection.FUSED_KEYS, key_selection.FUSED_SEQUENCES)
    try:
        for builds, ops in _GROUPS:
            library, module = _newest(builds, replaced.failed)
            for name, make in ops.items() if library else ():
                setattr(dsa, name, make(library, module, ours[name]))
                replaced.ops[name] = library.name
        library, module = _newest(deep_gemm.BUILDS, replaced.failed)
        if library is not None:
            Experts.forward = peer_experts.forward_on(module, forward)
            replaced.ops["Experts"] = library.name
        if _newest((marlin.MARLIN,), replaced.failed)[0] is not None:
            Experts.forward, replaced.ops["FP4 experts"] = forward_on_marlin(Experts.forward), "vllm"
        selects = _newest((operators.VLLM,), replaced.failed)[0] is not None
        if selects:
            replaced.ops["topk_indices"] = "vllm"
        if replaced.ops:
            dsa.topk_indices = _selection(selects, ours["topk_indices"])
            dsa.mha_varlen_fwd, replaced.ops["mha_varlen_fwd"] = _multi_head, "torch"
            attention.multi_head_is_faster = lambda *lengths: False
        if {"fp8_mqa_logits", "topk_indices"} & replaced.ops.keys():
            key_selection.FUSED_KEYS, key_selection.FUSED_SEQUENCES = _NEVER, 0
        yield replaced
    finally:
        for name, op in ours.items():
            setattr(dsa, name, op)
        attention.multi_head_is_faster, Experts.forward = form, forward
        key_selection.FUSED_KEYS, key_selection.FUSED_SEQUENCES = fused


def _newest(
    builds: Sequence[Library | Operators], failed: dict[str, str]
) -> tuple[Library | Operators | None, ModuleType | None]:
    """The first that is installed and not broken."""
    for library in builds:
        try:
            if (module := library.load()) is not None:
                return library, module
        except Exception as error:  # whatever an import raises
            failed[library.name] = f"failed: {reason(error)}"
    return None, None


def _scores(library: Library, module: ModuleType, ours: Op) -> Op:
    def scores(q, kv, weights, starts, ends, clean_logits=False, max_seqlen_k=0, accumulators=None):
        # The selection must know where in a row its first key is: rows of 2.8.1 begin with it.
        if library == deep_gemm.OLD:
            found = module.fp8_mqa_logits(q, kv, weights, starts, ends, clean_logits)
            found.begins = starts
        else:
            most = max_seqlen_k or len(kv[0])
            found = module.fp8_fp4_mqa_logits((q, None), kv, weights, starts, ends, most)
            found.begins = torch.zeros_like(starts)
        return found

    return scores


def _plan(library: Library, module: ModuleType, ours: Op) -> Op:
    return lambda lengths, page_size, sms: module.get_paged_mqa_logits_metadata(lengths[:, None], page_size, sms)


def _paged_scores(library: Library, module: ModuleType, ours: Op) -> Op:
    if library == deep_gemm.OLD:
        theirs = partial(module.fp8_paged_mqa_logits, clean_logits=False)
        return lambda q, cache, weights, lengths, *rest: theirs(q, cache, weights, lengths[:, None], *rest)
    theirs = module.fp8_fp4_paged_mqa_logits
    return lambda q, cache, weights, lengths, *rest: theirs((q, None), cache, weights, lengths[:, None], *rest)


def _linear(library: Library, module: ModuleType, ours: Op) -> Op:
    def product(a, b, out_dtype=torch.bfloat16):
        if out_dtype != torch.bfloat16:
            return ours(a, b, out_dtype)
        out = torch.empty(len(a[0]), len(b[0]), dtype=out_dtype, device=a[0].device)
        module.fp8_gemm_nt(a, b, out)
        return out

    return product


def _selection(theirs: bool, ours: Op) -> Op:
    """vLLM's, or else ours, over scores of either build of DeepGEMM or of ours."""

    def select(scores, k, *, lengths, starts=None, **paging):
        starts = getattr(scores, "begins", starts)
        if not theirs:
            return ours(scores, k, lengths=lengths, starts=starts, **paging)
        return _slots(_topk_indices(scores, k, lengths, starts), **paging)

    return select


def _topk_indices(scores: torch.Tensor, k: int, lengths: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    rows, stride = len(scores), scores.stride(0)
    topk_indices = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if starts is None:
        torch.ops._C.top_k_per_row_decode(scores, 1, lengths, topk_indices, rows, stride, 1, k)
    else:
        torch.ops._C.top_k_per_row_prefill(scores, starts, starts + lengths, topk_indices, rows, stride, 1, k)
    return topk_indices


def _multi_head(q, k, v, cu_q, cu_k, most_keys, scale, causal=True, *, k_rope=None, **selection):
    """Over all keys, in the form that FlashAttention 2 has them in: whole, and of one width with the values."""
    if k_rope is not None:
        k = torch.cat((k, k_rope[:, None].expand(-1, k.shape[1], -1)), -1)
    values = v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - values))
    most_queries = min(most_keys, len(q))
    out, lse, *_ = _flash_attention(q, k, v, cu_q, cu_k, most_queries, most_keys, 0.0, causal, False, scale=scale)
    return out[..., :values], lse


def _slots(topk_indices: torch.Tensor, block_table=None, page_size=None, row_to_seq=None) -> torch.Tensor:
    if block_table is None:
        return topk_indices
    table = block_table if row_to_seq is None else block_table[row_to_seq.long()]
    pages = table.gather(1, (topk_indices // page_size).clamp(0).long())
    return torch.where(topk_indices < 0, topk_indices, pages * page_size + topk_indices % page_size)


def _prefill(library: Library, module: ModuleType, ours: Op) -> Op:
    def attend(*arguments, topk_length=None):
        """Engines have -1 for keys that are not there, and no counts."""
        return module.flash_mla_sparse_fwd(*arguments, **flash_mla.OPTIONS[library])

    return attend


def _window(library: Library, module: ModuleType, ours: Op) -> Op:
    prefill = _prefill(library, module, ours)

    def attend(q, kv, cu_q, cu_k, window, scale, d_v=512, sink=None, *, indices):
        out, _, lse = prefill(q, kv, _lists(indices)[:, None], scale, d_v, sink)
        return out, lse

    return attend


def _window_sparse(library: Library, module: ModuleType, ours: Op) -> Op:
    prefill = _prefill(library, module, ours)

    def attend(q, kv, cu_q, cu_k, window, compressed, topk_indices, *softmax, window_indices, topk_length=None):
        keys = torch.cat((kv, compressed))
        entries = torch.where(topk_indices < 0, topk_indices, topk_indices + len(kv))
        lists = _lists(torch.cat((window_indices, entries), 1))
        out, _, lse = prefill(q, keys, lists[:, None], *softmax)
        return out, lse

    return attend


def _window_cast(library: Library, module: ModuleType, ours: Op) -> Op:
    """As an engine has it: attention, rotation and cast one after the other, of which the last two are ours."""
    window, window_sparse = _window(library, module, ours), _window_sparse(library, module, ours)

    def attend(*arguments, topk_length=None, window_indices, use_ue8m0=True):
        *packed, compressed, rows, cos, sin, groups, scale, sink = arguments
        softmax = (scale, packed[0].shape[2], sink)
        if compressed is None:
            out, _ = window(*packed, *softmax, indices=window_indices)
        else:
            out, _ = window_sparse(
                *packed, compressed, rows, *softmax, topk_length=topk_length, window_indices=window_indices
            )
        out = dsa.apply_rotary(out, cos, -sin, interleaved=True, dims="last", out=out)
        places = _group_places(len(out), groups, out.device)
        return dsa.scatter_cast_to_fp8(out.view(len(places), -1), places, use_ue8m0)

    return attend


@lru_cache(1)  # of all layers of a pass
def _group_places(tokens: int, groups: int, device: torch.device) -> torch.Tensor:
    return GroupRows.of(tokens, groups, device).to_groups


def _lists(indices: torch.Tensor) -> torch.Tensor:
    """With -1 up to a length that FlashMLA takes."""
    return torch.nn.functional.pad(indices, (0, -indices.shape[1] % 128), value=-1)


def _decode(library: Library, module: ModuleType, ours: Op) -> Op:
    plans: dict[tuple, Any] = {}

    def attend(q, cache, table, lengths, d_v, plan, num_splits=None, **options):
        if options.get("indices") is None:
            return ours(q, cache, table, lengths, d_v, plan, num_splits, **options)
        plan = _plan_of(plans, module, q, cache, options)
        # Counts are no option of pages of 656 bytes; what is behind them is -1.
        options = {name: x for name, x in options.items() if not name.endswith("topk_length")}
        options |= flash_mla.OPTIONS[library]
        return module.flash_mla_with_kvcache(q, cache, None, None, d_v, plan, None, **options)

    return attend


def _plan_of(plans: dict[tuple, Any], module: ModuleType, q: torch.Tensor, cache: torch.Tensor, options: dict) -> Any:
    """Of a call over selected keys a plan depends on shapes alone: the first such call makes it, not one in a graph,
    whose memory is the graph's."""
    tensors = (cache, options["indices"], options.get("extra_k_cache"), options.get("extra_indices_in_kvcache"))
    key = (q.shape, *(None if x is None else x.shape[1:] for x in tensors))
    if key in plans:
        return plans[key]
    made, _ = module.get_mla_metadata()
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        plans[key] = made
    return made


Make = Callable[[Library, ModuleType, Op], Op]
_GROUPS: tuple[tuple[Sequence[Library], Mapping[str, Make]], ...] = (
    (
        deep_gemm.BUILDS,
        {
            "fp8_mqa_logits": _scores,
            "get_paged_mqa_logits_metadata": _plan,
            "fp8_paged_mqa_logits": _paged_scores,
            "fp8_gemm_nt": _linear,
        },
    ),
    (
        flash_mla.BUILDS,
        {
            "flash_mla_sparse_fwd": _prefill,
            "flash_mla_with_kvcache": _decode,
            "sliding_window_attention": _window,
            "window_sparse_attention": _window_sparse,
            "window_attention_cast_to_fp8": _window_cast,
        },
    ),
)
