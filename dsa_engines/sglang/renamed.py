"""Define the index scores of sgl-deep-gemm 0.2.5 under the names that SGLang 0.5.23 calls.

sgl-deep-gemm 0.2.5 has `fp8_fp4_mqa_logits` and `fp8_fp4_paged_mqa_logits` instead of `fp8_mqa_logits` and
`fp8_paged_mqa_logits`. They take q as a pair (q, None) and have no clean_logits. `fp8_fp4_mqa_logits` requires
max_seqlen_k: column 0 is the query's first key, and scores outside [ks, ke) are undefined.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from dsa_engines.replacements import NotFound, find

Function = Callable[..., torch.Tensor]


def _fp8_mqa_logits(renamed: Function) -> Function:
    def fp8_mqa_logits(
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        ks: torch.Tensor,
        ke: torch.Tensor,
        clean_logits: bool = False,
        max_seqlen_k: int = 0,
    ) -> torch.Tensor:
        if clean_logits or max_seqlen_k <= 0:
            raise ValueError(
                "clean_logits, max_seqlen_k: must be False and above 0 with sgl-deep-gemm 0.2.5, got "
                f"{clean_logits} and {max_seqlen_k}"
            )
        return renamed((q, None), kv, weights, ks, ke, max_seqlen_k)

    return fp8_mqa_logits


def _fp8_paged_mqa_logits(renamed: Function) -> Function:
    def fp8_paged_mqa_logits(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        schedule_meta: torch.Tensor,
        max_context_len: int,
        clean_logits: bool = False,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if clean_logits:
            raise ValueError("clean_logits: must be False with sgl-deep-gemm 0.2.5, got True")
        arguments = kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, indices
        return renamed((q, None), *arguments)

    return fp8_paged_mqa_logits


class Renamed(NamedTuple):
    """path, parameters: of the function in sgl-deep-gemm 0.2.5. under_old_name: makes the old function from it."""

    path: str
    parameters: Sequence[str]
    under_old_name: Callable[[Function], Function]


_KEYS = ("context_lens", "block_table", "schedule_meta", "max_context_len", "indices")
_RANGES = ("cu_seq_len_k_start", "cu_seq_len_k_end", "max_seqlen_k", "schedule_meta")
RENAMED = {
    "deep_gemm:fp8_mqa_logits": Renamed(
        "deep_gemm:fp8_fp4_mqa_logits", ("q", "kv", "weights", *_RANGES), _fp8_mqa_logits
    ),
    "deep_gemm:fp8_paged_mqa_logits": Renamed(
        "deep_gemm:fp8_fp4_paged_mqa_logits", ("q", "kv_cache", "weights", *_KEYS), _fp8_paged_mqa_logits
    ),
}


def _exists(path: str) -> bool:
    try:
        find(path)
    except NotFound:
        return False
    return True


def is_renamed(path: str) -> bool:
    """Return whether this function exists only under its new name."""
    return path in RENAMED and not _exists(path) and _exists(RENAMED[path].path)


def installed(path: str, parameters: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return (path, parameters) of the installed function, which has the old or the new name."""
    return RENAMED[path][:2] if is_renamed(path) else (path, parameters)


def add_old_names(paths: Iterable[str]) -> list[str]:
    """Also define the renamed ones of these functions under their old names. Return the old paths."""
    added = [*filter(is_renamed, paths)]
    for path in added:
        owner, name, _ = find(RENAMED[path].path)
        setattr(owner, path.partition(":")[2], RENAMED[path].under_old_name(getattr(owner, name)))
    return added


def remove_old_names(paths: Iterable[str]) -> None:
    """Undo add_old_names."""
    for path in paths:
        owner, name, _ = find(path)
        delattr(owner, name)
