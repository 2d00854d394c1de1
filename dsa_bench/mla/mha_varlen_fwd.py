"""Multi-head attention over packed sequences, of all causal keys and of 2048 selected ones, beside cuDNN's over all
keys; and, as a yardstick, absorbed attention over the selected keys."""

from functools import cache, partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dsa
from dsa.testing import assert_close, bf16_gemm_rate
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.case import Call, Case

V32, GLM5 = (128, 192, 128), (64, 256, 256)
TOP_K = 2048
# sequences, tokens of each, of which new; heads, d, dv; whether keys are selected
SHAPES = [
    *((*sizes, *V32, selecting) for sizes in ((1, 4096, 4096), (1, 8192, 8192)) for selecting in (False, True)),
    *((*sizes, *V32, False) for sizes in ((64, 512, 512), (256, 100, 100), (16, 2000, 2000))),
    (4, 3000, 3000, *V32, True),
    (1, 8192, 2048, *V32, True),
    *((1, 8192, 8192, *GLM5, selecting) for selecting in (False, True)),
    (64, 512, 512, *GLM5, False),
]
_ceiling = cache(bf16_gemm_rate)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q, k, v [B, H, S, .]: all sequences are of the same length, and all of their tokens are new."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def case(sequences: int, keys: int, new: int, heads: int, d: int, dv: int, selecting: bool) -> Case:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    queries, rows, scale = sequences * new, sequences * keys, d**-0.5
    q, k, v = normal(queries, heads, d), normal(rows, heads, d), normal(rows, heads, dv)
    cu_q, cu_k = (torch.arange(0, n + 1, each, device="cuda").int() for n, each in ((queries, new), (rows, keys)))
    visible = (keys - new + 1 + torch.arange(new, device="cuda")).repeat(sequences).int()
    pairs = int(visible.sum())
    options = {}
    if selecting:
        starts = torch.arange(sequences, device="cuda").repeat_interleave(new).int() * keys
        indices = _selected(visible, keys)
        bits = dsa.selection_bits(torch.where(indices < 0, indices, indices + starts[:, None]), starts, keys)
        options = {"selected": bits, "dense_keys": TOP_K}
    calls: dict[str, list[Call]] = {"dsa": [partial(dsa.mha_varlen_fwd, q, k, v, cu_q, cu_k, keys, scale, **options)]}
    failed, yardsticks = {}, set()
    if new == keys:
        by_sequence = [x.view(sequences, keys, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        try:
            _cudnn(*by_sequence, scale)
            calls["cuDNN"] = [partial(_cudnn, *by_sequence, scale)]
        except RuntimeError as error:
            failed["cuDNN"] = str(error).splitlines()[0]
    if selecting and (heads, d, dv) == V32:
        absorbed, latents = normal(queries, heads, 576), normal(rows, 1, 576)
        lists = torch.where(indices < 0, indices, indices + starts[:, None])[:, None]
        arguments = absorbed, latents, lists, scale, 512, None, (indices >= 0).sum(-1).int()
        calls["absorbed, 2048 keys"] = [partial(dsa.flash_mla_sparse_fwd, *arguments)]
        yardsticks.add("absorbed, 2048 keys")
    if selecting:
        yardsticks.add("cuDNN")

    def figure(ms: float) -> str:
        rate = 2 * pairs * heads * (d + dv) / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / _ceiling():.0%} of bf16 GEMM"

    def check(got: tuple[torch.Tensor, torch.Tensor]) -> None:
        few = slice(queries - 64, queries)
        of_last = torch.tensor([0, 64], device="cuda").int(), torch.tensor([0, keys], device="cuda").int()
        own = {"selected": options["selected"][few]} if selecting else {}
        with dsa.use_backend("reference"):
            tensors = q[few].float(), k[-keys:].float(), v[-keys:].float()
            expected, lse = dsa.mha_varlen_fwd(*tensors, *of_last, keys, scale, **own)
        assert_close("out", got[0][few], expected, abs_tol=2e-3, rel_tol=2e-2, cos_tol=2e-5)
        assert_close("lse", got[1][:, few], lse, abs_tol=1e-3, rel_tol=1e-5)

    name = f"{sequences} x {keys}" + (f", last {new}" if new < keys else "")
    name += f", {heads} heads of {d}/{dv}" + (f", {TOP_K} keys selected" if selecting else "")
    others = {"failed": failed, "yardsticks": frozenset(yardsticks & calls.keys()), "agree": _agree}
    return Case(name, calls, figure, check, **others)


def _agree(theirs: torch.Tensor, ours: tuple[torch.Tensor, torch.Tensor]) -> None:
    """cuDNN's result has a dimension of sequences, and its heads in front of the tokens."""
    agree(theirs.transpose(1, 2).flatten(0, 1), ours)


def _selected(visible: torch.Tensor, keys: int) -> torch.Tensor:
    """int32 [T, TOP_K]: keys at random among those that a query sees, all of them where they are fewer; then -1."""
    chunks = []
    for count in visible.split(1024):
        scores = torch.rand(len(count), max(keys, TOP_K), device="cuda")
        place = torch.arange(scores.shape[1], device="cuda")
        best = scores.masked_fill(place >= count[:, None], -1.0).topk(TOP_K)
        chunks.append(best.indices.where(best.values >= 0, -1).int())
    return torch.cat(chunks)
