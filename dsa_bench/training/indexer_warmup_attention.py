"""The attention and loss of the indexer's warm-up stage, forward and backward. The yardstick is PyTorch's flash
attention (FA2), which does a part of this work.

Forward, as CUDA graphs: our op computes attention, the loss and the indexer's gradients; FA2 computes its forward pass.
Backward: our op runs the backward pass of the sum of the queries' losses, or of a sum with a random weight per query
("weighted"); FA2 runs its backward pass. Ratios are FA2's time / ours.
"""

from functools import partial

import torch

import dsa
from dsa.ops.training._packed_attention import flash_backward
from dsa_bench.harness.case import Call, Case, bf16, f32

SEQUENCE = 2048
# heads, key heads, d, dv, index heads, channels per index head (di): MQA, MHA with 16 and with 128 heads, V3.2's heads
MODELS = [
    (64, 1, 128, 128, 64, 64),
    (16, 16, 128, 128, 16, 64),
    (128, 128, 128, 128, 64, 64),
    (128, 128, 192, 128, 64, 128),
]
PASSES = "forward", "backward", "weighted backward"
# With V3.2's heads FA2's backward pass over 64 sequences needs more than the 80 GB of an H100.
BACKWARD_AT_64 = MODELS[:-1]
SHAPES = [
    (which, batch, *model)
    for batch in (4, 16, 64)
    for model in MODELS
    for which in PASSES
    if which == "forward" or batch < 64 or model in BACKWARD_AT_64
]


class _Inputs:
    def __init__(self, batch, heads, key_heads, d, dv, index_heads, di):
        tokens = batch * SEQUENCE
        self.q, self.k, self.v = bf16(tokens, heads, d), bf16(tokens, key_heads, d), bf16(tokens, key_heads, dv)
        self.indexer = [
            (bf16(tokens, index_heads, di) * di**-0.25).requires_grad_(),
            (bf16(tokens, di) * di**-0.25).requires_grad_(),
            (f32(tokens, index_heads) * index_heads**-0.5).requires_grad_(),
        ]
        bounds = torch.arange(0, tokens + 1, SEQUENCE, device="cuda", dtype=torch.int32)
        self.sequences = bounds, bounds, SEQUENCE, SEQUENCE
        self.scale = d**-0.5

    def ours(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tensors = self.q, self.k, self.v, *self.indexer
        return dsa.indexer_warmup_attention(*tensors, *self.sequences, self.scale, True)

    def fa2(self) -> tuple[Call, Call]:
        """Return calls of FA2's forward and backward pass, with values padded to the keys' channels."""
        v = torch.nn.functional.pad(self.v, (0, self.q.shape[2] - self.v.shape[2]))
        forward = partial(
            *(torch.ops.aten._flash_attention_forward, self.q, self.k, v, *self.sequences, 0.0, True, False),
            scale=self.scale,
        )
        out, lse, *_ = forward()
        # Pass the result as its own gradient, because another tensor of this size would not fit in 80 GB.
        return forward, partial(flash_backward, out, self.q, self.k, v, out, lse, self.sequences, self.scale, True)

    def extra_memory(self) -> float:
        """Return the peak memory of our forward and backward pass, without the inputs, in multiples of the inputs'
        memory."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(self.ours()[2].sum(), self.indexer)
        inputs = sum(x.nbytes for x in (self.q, self.k, self.v, *self.indexer))
        return (torch.cuda.max_memory_allocated() - before) / inputs


def case(which: str, batch: int, *model: int) -> Case:
    inputs = _Inputs(batch, *model)
    heads, key_heads, d, dv, index_heads, di = model
    memory = inputs.extra_memory()
    fa2_forward, fa2_backward = inputs.fa2()
    pairs = batch * SEQUENCE * (SEQUENCE + 1) // 2
    if which == "forward":
        calls = {"dsa": [inputs.ours], "FA2 forward": [fa2_forward]}
    else:
        kl = inputs.ours()[2]
        total = kl.sum() if which == "backward" else (kl * torch.rand_like(kl)).sum()
        ours = partial(torch.autograd.grad, total, inputs.indexer, retain_graph=True)
        calls = {"dsa": [ours], "FA2 backward": [fa2_backward]}

    def figure(ms: float) -> str:
        if which != "forward":
            return f"{ms * 1e3 / batch / SEQUENCE:.3f} us a token"
        # FLOP per pair: all heads' scores twice (attention and loss) and their outputs; for the indexer, its scores and
        # two products with their gradient.
        rate = 2 * pairs * (heads * (2 * d + dv) + 3 * index_heads * di) / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {memory:.2f} of the inputs' memory"

    return Case(
        f"{which}, {batch} x {SEQUENCE}, {heads} heads of {d}/{dv}, {key_heads} of keys, index {index_heads} x {di}",
        calls,
        figure,
        graph=which == "forward",
        repeats=5,
        yardsticks={"FA2 forward", "FA2 backward"},
    )
