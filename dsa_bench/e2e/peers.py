"""A model's layers on the peers' kernels: replaces our ops by the peers' ops that can be imported.

The peers are those of engines that run DeepSeek-V3.2, each in the newest installed build:
- DeepGEMM computes the index scores and the FP8 linear layers, vLLM the top-k, and FlashMLA the attention to selected
  keys. FlashMLA has only the absorbed form of this attention.
- Prompts that attend to all keys run in the multi-head form in PyTorch, with 0.29 (V3.2) or 0.47 (GLM-5) of the
  absorbed form's multiply-adds. A pass whose prompts are whole and have one length runs on cuDNN's kernel, any other
  pass on FlashAttention 2.
- In V4's prefill the window's keys and the compressed entries are copied into one tensor for FlashMLA. Engines keep
  both in one tensor from the start.
- Experts run on DeepGEMM's grouped products (peer_experts.py), and FP4 experts of decoding on vLLM's Marlin.

No peer fuses selection with scores, so scores and top-k are always two ops. All other ops, such as cache writers, stay
ours. Work that only converts our tensors to a library's layout is marked as glue (`parts.glue`).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dsa
from dsa_bench.e2e import peer_experts
from dsa_bench.e2e.parts import glue
from dsa_bench.e2e.peer_slots import to_slots
from dsa_bench.e2e.replacing import replaced
from dsa_bench.harness.calls import Loadable, reason
from dsa_bench.peers import deep_gemm, flash_mla, marlin, operators, topk
from dsa_bench.peers.package import Library
from dsa_layers.batch.packing import GroupRows
from dsa_layers.engine import paged_attention
from dsa_layers.engine.fused_moe import FusedMoE
from dsa_layers.layers import key_selection
from dsa_layers.layers.experts import Experts

Op = Callable[..., Any]
_NEVER = 2**31  # keys: more than any call has, so scores and selection are never fused
_PERSISTENT_COLUMNS = 65536  # from this width on, the persistent top-k is faster than the top-k for prompts
_flash_attention = torch.ops.aten._flash_attention_forward
_workspaces: dict[torch.device, torch.Tensor] = {}


@dataclass
class Replaced:
    """The peers that were found. ops: {replaced op: name of the peer's library}. failed: {installed library that could
    not be imported: reason}. values: (owner, attribute, value) of all replacements."""

    ops: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    values: list[tuple[object, str, Any]] = field(default_factory=list)

    @property
    def libraries(self) -> list[str]:
        return sorted(set(self.ops.values()))

    @contextlib.contextmanager
    def in_place(self) -> Iterator["Replaced"]:
        with replaced(self.values):
            yield self

    def newest(self, builds: Sequence[Loadable]) -> tuple[Loadable | None, ModuleType | None]:
        """Return the first of the builds that can be imported, and its module, or (None, None)."""
        for library in builds:
            try:
                if (module := library.load()) is not None:
                    return library, module
            except Exception as error:  # an import may raise anything
                self.failed[library.name] = f"failed: {reason(error)}"
        return None, None


def peer_kernels() -> contextlib.AbstractContextManager[Replaced]:
    """Return a context manager that replaces our ops by the peers' ops within the block and yields the `Replaced`.
    Without peers no op is replaced."""
    return replacement().in_place()


def replacement() -> Replaced:
    """Find the peers' ops that can be imported. The result's `in_place` replaces our ops by them."""
    found = Replaced()
    for builds, ops in _GROUPS:
        library, module = found.newest(builds)
        for name, op in ops.items() if library else ():
            found.values.append((dsa, name, partial(op, _Peer(library, module, getattr(dsa, name)))))
            found.ops[name] = library.name
    library, module = found.newest(deep_gemm.BUILDS)
    if library is not None:
        found.ops["Experts"] = library.name
    on_marlin = found.newest((marlin.MARLIN,))[0] is not None
    if on_marlin:
        found.ops["FP4 experts"] = "vllm"
    if library is not None or on_marlin:
        kinds = (Experts, peer_experts.forward_on), (FusedMoE, peer_experts.mixture_on)
        found.values += [(kind, "forward", on(module, on_marlin, kind.forward)) for kind, on in kinds]
    theirs = None
    if found.newest((operators.VLLM,))[0] is not None:
        theirs, found.ops["topk_indices"] = _vllm_topk, "vllm"
    if found.ops:
        found.ops["mha_varlen_fwd"] = "torch"
        found.values += [
            (dsa, "topk_indices", partial(_select, theirs, dsa.topk_indices)),
            (dsa, "mha_varlen_fwd", _multi_head),
            (paged_attention, "multi_head_is_faster", lambda *lengths: False),
        ]
    if {"fp8_mqa_logits", "topk_indices"} & found.ops.keys():
        found.values.append((key_selection, "FUSED_KEYS", _NEVER))
    return found


@dataclass(frozen=True)
class _Peer:
    """The peer of an op: the library's build, its module, and our op. plans: {shapes: FlashMLA's plan}."""

    build: Library
    module: ModuleType
    ours: Op
    plans: dict[tuple, Any] = field(default_factory=dict)


def _scores(peer: _Peer, q, kv, weights, starts, ends, clean_logits=False, max_seqlen_k=0, accumulators=None):
    # `_select` needs the column of a row's first key (`begins`): 0 in 2.8.1, whose rows begin with the first key, and
    # the key's index in the older build.
    at_zero = peer.build != deep_gemm.OLD
    if at_zero:
        found = peer.module.fp8_fp4_mqa_logits((q, None), kv, weights, starts, ends, max_seqlen_k or len(kv[0]))
    else:
        found = peer.module.fp8_mqa_logits(q, kv, weights, starts, ends, clean_logits)
    found.begins, found.at_zero = torch.zeros_like(starts) if at_zero else starts, at_zero
    return found


def _paged_scores(peer: _Peer, q, cache, weights, lengths, *rest):
    arguments = cache, weights, lengths[:, None], *rest
    if peer.build == deep_gemm.OLD:
        return peer.module.fp8_paged_mqa_logits(q, *arguments, clean_logits=False)
    return peer.module.fp8_fp4_paged_mqa_logits((q, None), *arguments)


def _linear(peer: _Peer, a, b, out_dtype=torch.bfloat16):
    if out_dtype != torch.bfloat16:
        return peer.ours(a, b, out_dtype)
    out = torch.empty(len(a[0]), len(b[0]), dtype=out_dtype, device=a[0].device)
    with glue():  # engines' quantising kernels write this layout
        scales = peer.module.get_mn_major_tma_aligned_tensor(a[1])
    peer.module.fp8_gemm_nt((a[0], scales), b, out)
    return out


def _select(theirs: Op | None, ours: Op, scores, k, *, lengths, starts=None, **paging):
    """Select keys with vLLM's top-k (`theirs`), or with ours if `theirs` is None."""
    starts = getattr(scores, "begins", starts)
    if theirs is None:
        return ours(scores, k, lengths=lengths, starts=starts, **paging)
    return to_slots(theirs(scores, k, lengths, starts, starts is None or getattr(scores, "at_zero", False)), **paging)


def _vllm_topk(
    scores: torch.Tensor, k: int, lengths: torch.Tensor, starts: torch.Tensor | None, at_zero: bool
) -> torch.Tensor:
    """Select with the vLLM kernel that is fastest in `dsa bench topk_indices`. The cooperative and the persistent
    kernel accept only contiguous scores whose keys start in the first column. They need a workspace of zeros, which is
    zero again after the call."""
    (rows, columns), stride = scores.shape, scores.stride(0)
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    cooperates = rows <= topk.COOPERATIVE_ROWS
    if (
        at_zero
        and scores.is_contiguous()
        and k in topk.SELECTED
        and (cooperates or starts is None or columns >= _PERSISTENT_COLUMNS)
    ):
        select = torch.ops._C.cooperative_topk if cooperates else torch.ops._C.persistent_topk
        workspace = _kept(
            _workspaces, scores.device, partial(torch.zeros, topk.WORKSPACE_BYTES, dtype=torch.uint8), scores.device
        )
        select(scores, lengths, out, workspace, k, columns)
    elif starts is None:
        torch.ops._C.top_k_per_row_decode(scores, 1, lengths, out, rows, stride, 1, k)
    else:
        torch.ops._C.top_k_per_row_prefill(scores, starts, starts + lengths, out, rows, stride, 1, k)
    return out


def _kept(values: dict[Any, Any], key: Any, make: Callable[..., Any], device: torch.device) -> Any:
    """Return values[key]; make the value if the key is missing. A value made during a graph's capture is not stored,
    because its memory belongs to the graph."""
    if key in values:
        return values[key]
    made = make(device=device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        values[key] = made
    return made


def _multi_head(q, k, v, cu_q, cu_k, most_keys, scale, causal=True, *, k_rope=None, **selection):
    """Attend to all keys. Return (output, LSE or None).

    Whole prompts of one length run on cuDNN's kernel, other prompts on FlashAttention 2 with values padded to the keys'
    channels. PyTorch has no other kernel for prompts of several lengths.
    """
    if k_rope is not None:
        k = torch.cat((k, k_rope[:, None].expand(-1, k.shape[1], -1)), -1)
    sequences = len(cu_q) - 1
    if len(q) == len(k) == sequences * most_keys:  # no prompt is longer than most_keys, so all have this length
        by_sequence = (x.unflatten(0, (sequences, most_keys)).transpose(1, 2) for x in (q, k, v))
        return _one_length(*by_sequence, causal, scale).transpose(1, 2).flatten(0, 1), None
    values = v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - values))
    most = min(most_keys, len(q)), most_keys
    out, lse, *_ = _flash_attention(q, k, v, cu_q, cu_k, *most, 0.0, causal, False, scale=scale)
    return out[..., :values], lse


def _one_length(q, k, v, causal: bool, scale: float) -> torch.Tensor:
    """Return the attention of q to k and v, all [B, H, S, D]. Request cuDNN's kernel, because PyTorch would choose
    FlashAttention 2 on a GPU."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *([] if q.is_cuda else [SDPBackend.MATH])]):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _prefill(peer: _Peer, *arguments, topk_length=None):
    """Call FlashMLA's prefill without topk_length, because engines mark missing keys by -1 and pass no counts."""
    return peer.module.flash_mla_sparse_fwd(*arguments, **flash_mla.OPTIONS[peer.build])


def _window(peer: _Peer, q, kv, cu_q, cu_k, window, scale, d_v=512, sink=None, *, indices):
    out, _, lse = _prefill(peer, q, kv, _lists(indices)[:, None], scale, d_v, sink)
    return out, lse


def _window_sparse(
    peer: _Peer, q, kv, cu_q, cu_k, window, compressed, topk_indices, *softmax, window_indices, topk_length=None
):
    keys = torch.cat((kv, compressed))
    lists = _lists(torch.cat((window_indices, torch.where(topk_indices < 0, topk_indices, topk_indices + len(kv))), 1))
    out, _, lse = _prefill(peer, q, keys, lists[:, None], *softmax)
    return out, lse


def _window_cast(peer: _Peer, *arguments, topk_length=None, window_indices, use_ue8m0=True):
    *packed, compressed, rows, cos, sin, groups, scale, sink = arguments
    softmax = (scale, packed[0].shape[2], sink)
    if compressed is None:
        out, _ = _window(peer, *packed, *softmax, indices=window_indices)
    else:
        out, _ = _window_sparse(peer, *packed, compressed, rows, *softmax, window_indices=window_indices)
    out = dsa.apply_rotary(out, cos, -sin, interleaved=True, dims="last", out=out)
    rows_of_groups = _group_rows(len(out), groups, out.device)
    return dsa.scatter_cast_to_fp8(out.view(len(rows_of_groups), -1), rows_of_groups, use_ue8m0)


@lru_cache(1)  # shared by the layers of a pass
def _group_rows(tokens: int, groups: int, device: torch.device) -> torch.Tensor:
    return GroupRows.of(tokens, groups, device).to_groups


def _lists(indices: torch.Tensor) -> torch.Tensor:
    """Pad index lists with -1 to a multiple of 128, as FlashMLA's prefill requires."""
    return torch.nn.functional.pad(indices, (0, -indices.shape[1] % 128), value=-1)


def _decode(peer: _Peer, q, cache, table, lengths, d_v, plan, num_splits=None, **options):
    if options.get("indices") is None:
        return peer.ours(q, cache, table, lengths, d_v, plan, num_splits, **options)
    plan = _plan_of(peer, q, cache, options)
    # FlashMLA accepts no counts for caches of 656 bytes per token, and indices after the count are -1 anyway.
    options = {name: x for name, x in options.items() if not name.endswith("topk_length")}
    options |= flash_mla.OPTIONS[peer.build]
    return peer.module.flash_mla_with_kvcache(q, cache, None, None, d_v, plan, None, **options)


def _plan_of(peer: _Peer, q: torch.Tensor, cache: torch.Tensor, options: dict) -> Any:
    """Return FlashMLA's plan of a call over selected keys. The plan depends only on shapes."""
    tensors = (cache, options["indices"], options.get("extra_k_cache"), options.get("extra_indices_in_kvcache"))
    key = (q.shape, *(None if x is None else x.shape[1:] for x in tensors))
    return _kept(peer.plans, key, lambda device: peer.module.get_mla_metadata()[0], q.device)


_GROUPS: tuple[tuple[Sequence[Library], Mapping[str, Op]], ...] = (
    (
        deep_gemm.BUILDS,
        {
            "fp8_mqa_logits": _scores,
            "get_paged_mqa_logits_metadata": lambda peer, lengths, *sizes: peer.module.get_paged_mqa_logits_metadata(
                lengths[:, None], *sizes
            ),
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
