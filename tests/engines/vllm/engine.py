"""Run the .py files of vLLM's wheel on a CPU with the plugin. PyTorch functions take the place of vLLM's kernels that
the plugin does not replace. docs/reference/engines.md says how to get the files."""

import importlib.util
import types

import pytest
import torch

import dsa
from dsa.runtime import backends
from dsa_engines.switch import PARTS
from dsa_engines.vllm import install, seams, warm_up
from tests.engines.vllm import stand_in
from tests.engines.vllm.configurations import V32, config

PAGE = 64
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not there")


class HopperPlatform:
    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)
    is_cuda = staticmethod(lambda: True)
    is_xpu = is_rocm = is_cpu = staticmethod(lambda: False)
    is_device_capability_family = staticmethod(lambda family: family == 90)
    has_device_capability = staticmethod(lambda least: least <= 90)
    is_cuda_alike = is_cuda


def without_flash_mla(monkeypatch) -> None:
    """Add FlashMLA's functions to vLLM's V4 module, which lacks them without FlashMLA's library."""
    module = __import__(seams.V4, fromlist=["_"])
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        path = f"{seams.V4}:{name}"
        monkeypatch.setattr(module, name, stand_in.function(path, seams.SIGNATURES[path]))


def put_in_place(monkeypatch, ops: frozenset[str] = PARTS["vllm"], **options) -> None:
    """Install the plugin as in a worker on a Hopper GPU, but compile no kernels. The ops then run the references."""
    without_flash_mla(monkeypatch)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(warm_up, "failing", lambda calls, ops: {})
    assert install.install(config(V32, **{"cache": "fp8"} | options), ops)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "there is no GPU")


def int32(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def slots_of(table: torch.Tensor, request: int, length: int, page: int = PAGE) -> torch.Tensor:
    at = torch.arange(length)
    return table[request, at // page].long() * page + at % page


def workspaces() -> types.SimpleNamespace:
    return types.SimpleNamespace(get_simultaneous=lambda *specs: [torch.empty(s, dtype=d) for s, d in specs])


def pack(x: torch.Tensor, lengths: torch.Tensor, pad_value: float = -float("inf")) -> torch.Tensor:
    """Pad rows [T, ...] of sequences of these lengths to [B, longest, ...], as vLLM's pack_seq_triton does."""
    out = torch.full((len(lengths), int(lengths.max()), *x.shape[1:]), pad_value).to(x.dtype)
    for b, rows in enumerate(x.view(torch.uint8).split(lengths.tolist())):
        out.view(torch.uint8)[b, : len(rows)] = rows
    return out


def unpack(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[b, :n] for b, n in enumerate(lengths.tolist())])


def to_slots(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    BLOCK_SIZE: int = 64,
    BLOCK_STRIDE_ROWS: int | None = None,
    return_valid_counts: bool = False,
    prefill_workspace_request_ids: torch.Tensor | None = None,
    prefill_workspace_starts: torch.Tensor | None = None,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    **_,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convert indices of a request's keys to slots, or in prefill to rows of a workspace, as vLLM's
    triton_convert_req_index_to_global_index does.

    With dcp_size ranks, rank r has the keys r, r + dcp_size, ... Other keys become -1, as in
    triton_filter_and_convert_dcp_index.
    """
    mine = (token_indices >= 0) & (token_indices % dcp_size == dcp_rank)
    local = torch.where(mine, token_indices // dcp_size, 0).long()
    page = block_table[req_id.long()[:, None], local // BLOCK_SIZE].long()
    out = page * (BLOCK_STRIDE_ROWS or BLOCK_SIZE) + local % BLOCK_SIZE
    if prefill_workspace_request_ids is not None:
        request = prefill_workspace_request_ids.long()
        of_prefill = (request >= 0)[:, None]
        out = torch.where(of_prefill, prefill_workspace_starts[request.clamp(min=0)].long()[:, None] + local, out)
    out = torch.where(mine, out, -1).int()
    return (out, (out >= 0).sum(-1).int()) if return_valid_counts else out


def upconvert(cache, out, table, starts, count) -> None:
    """Copy the keys of the first `count` requests to a workspace as bf16 rows, as vLLM's
    cp_gather_and_upconvert_fp8_kv_cache does."""
    ends = [*starts[1:].tolist(), len(out)]
    for b in range(count):
        length = ends[b] - int(starts[b])
        out[int(starts[b]) : ends[b]] = dsa.read_kv_cache(cache.unsqueeze(2), slots_of(table, b, length)).bfloat16()
