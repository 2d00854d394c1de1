"""Kimi delta attention: a linear attention whose state decays per channel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dsa.runtime.checks import check_number, integer
from dsa_layers.batch.token_batch import TokenBatch, check_batch, check_no_cache, check_tokens
from dsa_layers.layers.delta_rule import delta_rule
from dsa_layers.layers.linear import Linear, check_rows, make_linear
from dsa_layers.layers.norm import RMSNorm


class ShortConvolution(nn.Module):
    """The weight of a causal convolution, y_t = silu(sum_j weight[:, 0, j] x_{t - width + 1 + j}) per channel, where x
    is 0 before the sequence. `convolve` computes the convolution.

    Parameter: weight fp32 [channels, 1, width], as in `nn.Conv1d`.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=torch.float32))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=width**-0.5)


class DeltaInputs(NamedTuple):
    """The projections of T tokens.

    mixed  [T, 3 * heads * dim]: q, k and v before the convolution
    decay  fp32 [T, heads, dim]: log of the state's decay, at most 0
    beta   fp32 [T, heads]
    gate   [T, heads, dim], before its sigmoid
    """

    mixed: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor


class KimiDeltaAttention(nn.Module):
    """Attention with a matrix S per head: S_t = D_t S_{t-1} + beta_t k_t (v_t - k_t^T D_t S_{t-1})^T, o_t = S_t^T q_t.

    q, k and v are short convolutions of projections of x (`ShortConvolution`). q and k are divided by sqrt(sum of
    squares + 1e-6), and q also by sqrt(dim). beta = sigmoid(b_proj x), per head.
    D_t = diag(e^{decay_t}), decay = lower_bound * sigmoid(e^{A_log} (f_b_proj f_a_proj x + dt_bias)).
    y = o_proj(RMSNorm(o) * sigmoid(g_b_proj g_a_proj x)), with the norm per head.

    forward(x [T, hidden], cos, sin, batch, cache=None, selected=None) -> (y [T, hidden], selected)
    The layer has no rope and ignores cos and sin. batch: complete packed sequences. selected: returned unchanged.
    This class supports gradients but no cache; `dsa_layers.fuse` converts it to `PagedDeltaAttention`.
    conv_width: tokens that the convolution reads. lower_bound: minimum of decay, below 0. eps: of the RMSNorm. fp8,
    dtype, use_ue8m0: see `make_linear`; b_proj is never in FP8.
    Parameters: q_proj, k_proj, v_proj, f_b_proj, g_b_proj [heads * dim, ...], f_a_proj, g_a_proj [dim, hidden], b_proj
    [heads, hidden], q_conv1d, k_conv1d, v_conv1d, A_log fp32 [heads], dt_bias fp32 [heads * dim], o_norm [dim], o_proj.
    The constructor raises TypeError or ValueError, which names the argument, for wrong sizes.
    Source: Kimi Linear's report (arXiv 2510.26692); `Glm5NextTextLinearAttention` of transformers 5.
    """

    def __init__(
        self,
        hidden: int,
        n_heads: int,
        *,
        dim: int = 128,
        conv_width: int = 4,
        lower_bound: float = -5.0,
        eps: float = 1e-5,
        fp8: bool = False,
        dtype: torch.dtype | None = None,
        use_ue8m0: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"hidden": hidden, "n_heads": n_heads, "dim": dim, "conv_width": conv_width}
        for name, size in sizes.items():
            integer(name, size, at_least=1)
        check_number("lower_bound", lower_bound)
        if lower_bound >= 0:
            raise ValueError(f"lower_bound: must be below 0, got {lower_bound}")
        self.n_heads, self.dim, self.conv_width, self.lower_bound = n_heads, dim, conv_width, lower_bound
        options: dict[str, Any] = {"fp8": fp8, "dtype": dtype, "use_ue8m0": use_ue8m0}
        inner = n_heads * dim
        self.q_proj, self.k_proj, self.v_proj = (make_linear(hidden, inner, **options) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConvolution(inner, conv_width) for _ in range(3))
        self.f_a_proj, self.g_a_proj = (make_linear(hidden, dim, **options) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (make_linear(dim, inner, **options) for _ in range(2))
        self.b_proj = Linear(hidden, n_heads, dtype=dtype)
        self.A_log = nn.Parameter(torch.zeros(n_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(inner, dtype=torch.float32))
        self.o_norm = RMSNorm(dim, eps)
        self.o_proj = make_linear(inner, hidden, **options)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: TokenBatch,
        cache: object = None,
        selected: Any = None,
    ) -> tuple[torch.Tensor, Any]:
        self.check_pass(x, batch)
        check_tokens(x, batch.positions)
        check_no_cache(cache, batch)
        inputs = self._project(x)
        out = self._without_cache(inputs, batch)
        return self._output(out, inputs.gate, x.dtype), selected

    def _without_cache(self, inputs: DeltaInputs, batch: TokenBatch) -> torch.Tensor:
        """Return o [T, heads, dim] for complete sequences."""
        before = inputs.mixed.new_zeros(len(batch.query_lens), self.conv_width - 1, inputs.mixed.shape[1])
        return self._recur(self._convolve(inputs, before, batch.query_lens), inputs, batch.query_lens, None)[0]

    def check_pass(self, x: torch.Tensor, batch: TokenBatch) -> None:
        """Raise TypeError or ValueError if x does not fit the weights, or if `check_batch` rejects `batch`."""
        check_rows("x", x, self.q_proj)
        check_batch(batch)

    def _project(self, x: torch.Tensor) -> DeltaInputs:
        q, k, v, f, g = (layer(x) for layer in self.joint_layers())
        return self._gates(x, torch.cat((q, k, v), -1), f, g)

    def joint_layers(self) -> tuple[nn.Module, ...]:
        """Return the layers that can multiply x in one product (`join`): all projections of x except b_proj."""
        return self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.g_a_proj

    def _gates(self, x: torch.Tensor, mixed: torch.Tensor, f: torch.Tensor, g: torch.Tensor) -> DeltaInputs:
        """Return the `DeltaInputs`. mixed: as in `DeltaInputs`. f, g: f_a_proj(x) and g_a_proj(x)."""
        rate = (self.f_b_proj(f).float() + self.dt_bias.float()).unflatten(-1, (self.n_heads, self.dim))
        decay = self.lower_bound * torch.sigmoid(self.A_log.float().exp()[:, None] * rate)
        beta = self.b_proj(x).float().sigmoid()
        return DeltaInputs(mixed, decay, beta, self.g_b_proj(g).unflatten(-1, (self.n_heads, self.dim)))

    def _convolve(self, inputs: DeltaInputs, before: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
        """Return q, k and v before q and k are normalised, [T, 3, heads, dim].

        before [B, conv_width - 1, 3 * heads * dim]: the rows of `mixed` for the last tokens before each sequence's new
        tokens; 0 before the first token of the sequence. lens: the number of new tokens per sequence.
        """
        made = convolve(inputs.mixed, before, self.conv_weight(), lens)
        return made.unflatten(-1, (3, self.n_heads, self.dim))

    def _recur(
        self, qkv: torch.Tensor, inputs: DeltaInputs, lens: Sequence[int], states: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o, states after each sequence's new tokens): the results of `delta_rule`. A subclass that runs
        kernels may return o in qkv's dtype.

        qkv: the result of `_convolve`. lens, states: see `delta_rule`.
        """
        q, k, v = qkv.unbind(1)
        q = l2_norm(q) * self.dim**-0.5
        return delta_rule(q, l2_norm(k), v, inputs.decay, inputs.beta, lens, states)

    def conv_weight(self) -> torch.Tensor:
        """Return the weights for q, k and v, concatenated: fp32 [3 * heads * dim, 1, conv_width]."""
        return torch.cat([part.weight.float() for part in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    def _output(self, out: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return y [T, hidden] from o [T, heads, dim]. The norm and its product with the gate are computed in fp32."""
        return self.o_proj((self.o_norm(out.float()) * gate.float().sigmoid()).to(dtype).flatten(1))


def convolve(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Return the `ShortConvolution` of packed sequences, [T, channels] in x's dtype, computed in fp32.

    x [T, channels]; weight fp32 [channels, 1, width]. before [B, width - 1, channels]: the rows before each sequence.
    lens: the rows per sequence.
    """
    alike = len(set(lens)) == 1
    sequences = [x.unflatten(0, (len(lens), -1))] if alike else [part[None] for part in x.split([*lens])]
    earlier = [before] if alike else before.split(1)
    found = []
    for rows, first in zip(sequences, earlier):
        inputs = torch.cat((first, rows), 1).float().transpose(1, 2)
        out = nn.functional.silu(nn.functional.conv1d(inputs, weight, groups=len(weight)))
        found.append(out.transpose(1, 2).flatten(0, 1).to(x.dtype))
    return torch.cat(found) if found else x


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Return x / sqrt(sum of x^2 + 1e-6) over the last dimension, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
