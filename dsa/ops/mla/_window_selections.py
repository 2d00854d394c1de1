"""The selections of the ops with sliding windows: the keys of each query's window, and other selected keys."""

import torch

from dsa.ops.mla import window_indices as window_lists
from dsa.ops.mla._sparse_attention import Selection, inner_contiguous
from dsa.runtime.declare import F32, FLOATS, INT32, ROWS, Int, Number, Tensor, rows_at_16_bytes

PACKED = {
    "q": Tensor("total_q H d", FLOATS),
    "kv": Tensor("total_k 1 d", FLOATS, like="q", layout=ROWS),
    "cu_seqlens_q": Tensor("B+1", INT32),
    "cu_seqlens_k": Tensor("B+1", INT32),
    "window": Int(),
}
SOFTMAX = {"softmax_scale": Number(), "d_v": Int(most="d"), "attn_sink": Tensor("H", F32, optional=True)}
WINDOW_LIST = Tensor("total_q window", INT32, optional=True)

Packed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]
Selected = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def window_selections(packed: Packed, near: torch.Tensor | None, selected: Selected | None) -> list[Selection]:
    """Return a `Selection` for the windows and one for `selected`, each only if it has keys.

    packed    queries, keys, both cu_seqlens, window
    near      the result of `window_indices`: the rows of kv in each query's window, [T, window]. None: computed here
    selected  None, or (other keys [n, 1, d], the indices [T, K] of each query's keys, counts). counts: None, or [T]:
              only the first counts[t] indices count"""
    q, kv, cu_seqlens_q, cu_seqlens_k, window = packed
    selections = []
    if kv.shape[0]:
        if near is None:
            lists = (cu_seqlens_q, cu_seqlens_k, len(q), min(window, len(kv)))
            near = window_lists._window_indices.launch_on(q.device, *lists)
        selections.append(Selection(_one_page(kv), inner_contiguous(near), None))
    if selected is not None and selected[0].shape[0] and selected[1].shape[1]:
        keys, indices, counts = selected
        counts = None if counts is None else inner_contiguous(counts)
        selections.append(Selection(_one_page(keys), inner_contiguous(indices), counts))
    return selections


def _one_page(keys: torch.Tensor) -> torch.Tensor:
    return rows_at_16_bytes(keys.squeeze(1).unsqueeze(0))
