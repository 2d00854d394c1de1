"""DeepSeek-V4's compressor: one entry for every block of tokens, and what it keeps of unfinished blocks."""

import torch
from torch import nn

import dsa
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import DRAFTS
from dsa_layers.layers.linear import FP32Linear
from dsa_layers.layers.norm import RMSNorm


class Compressor(nn.Module):
    """C_i = rope_{i m}(RMSNorm(sum_j softmax_j(Z_j) KV_j)) over the tokens j of block i, per channel; m = ratio.

    KV = x wkv^T, Z = x wgate^T + ape[j mod m], in fp32. With `overlap` wkv and wgate give 2 * dim channels, and entry i
    is made of the first half of block i - 1's and the second half of block i's tokens (`dsa.compress_kv`). Rope turns
    the last channels in interleaved pairs.

    compress(x [T, hidden], cos, sin fp32 [T, R / 2], batch) -> fp32 [N, dim]: the entries of whole sequences, packed.
    cos, sin: of the positions of the entries that the tokens may end (`EntryView.positions`).
    Parameters: wkv, wgate [c, hidden], ape fp32 [ratio, c], norm [dim]; c = 2 dim with overlap, else dim.
    Source: `Compressor` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.3.
    """

    def __init__(
        self,
        hidden: int,
        dim: int,
        ratio: int,
        *,
        overlap: bool,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.ratio, self.overlap = dim, ratio, overlap
        channels = 2 * dim if overlap else dim
        self.wkv, self.wgate = (FP32Linear(hidden, channels, dtype=dtype) for _ in range(2))
        self.ape = nn.Parameter(torch.zeros(ratio, channels, dtype=torch.float32))
        self.norm = RMSNorm(dim, eps)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of one sequence's state, from which it goes on after drafts, too."""
        return ((2 * self.ratio if self.overlap else self.ratio) + DRAFTS, 2, self.ape.shape[1])

    def compress(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        return self.entries(*self.project(x), cos, sin, batch)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """KV, and Z without ape, [T, c]."""
        return self.wkv(x), self.wgate(x)

    def entries(
        self, kv: torch.Tensor, gate: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: TokenBatch
    ) -> torch.Tensor:
        """The entries from what `project` returns."""
        starts = batch.earlier_lens_tensor
        entries, tokens = dsa.compress_kv(kv, gate, self.ape, batch.cu_query_lens, starts, overlap=self.overlap)
        return dsa.apply_rotary(self.norm(entries), cos[tokens], sin[tokens], interleaved=True, dims="last")
