"""Sparse MLA attention over selected latent keys of an FP8 cache: decoding, any number of heads.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

A and B are swapped: keys are the rows of both products, heads their columns: S^T = K Q^T, O^T += V^T P^T. So keys are
operands in registers, and go there from bytes by way of nothing else: no copy of them in 16 bits is ever stored.
Work, launch: sparse_mla_kernel.py; 16, 32 or 64 heads a CTA.
Warp roles: the load warpgroup gathers the bytes (fp8_kv_gather.py); one or two score warpgroups (fp8_kv_scores.py) have
S^T of 64 keys by wgmma, Q in shared memory, softmax, P^T to shared memory; two output warpgroups (fp8_kv_values.py)
have 256 channels x `head_tile` of O^T each. Score and output warpgroups all read the bytes.
All products of e4m3 are of f16, in which it is exact: two numbers are converted by one instruction. Scores are
multiplied by the scales in fp32; values are, in f16, by the scale in two parts.
Shared memory: Q, two stages of P^T, STAGES tiles of bytes.
Registers: the score, two output and the load warpgroup have 512 a lane together.
Constraints: limits.py; q in bf16, pages contiguous and at multiples of 16 bytes.
Roofline: of a tile of 64 heads wgmma takes 2176 clocks; shared memory delivers 82 KiB of bytes, 72 of Q, 64 of P^T and
takes in 41 and 8: 2140 clocks. Memory delivers a tile to all multiprocessors at once in 2300 clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint8, const_expr

from dsa.cute.fake_tensors import fake, strides
from dsa.kernels.mla.fp8_kv_gather import Fp8KvPipeline, Fp8TopkGather
from dsa.kernels.mla.fp8_kv_scores import Fp8KvScores, QkMmas
from dsa.kernels.mla.fp8_kv_values import Fp8KvValues
from dsa.kernels.mla.limits import FP8_KV_BYTES, FP8_KV_HEADS, SPARSE_HEAD_DIMS
from dsa.kernels.mla.mla_attention import RoleRegisters
from dsa.kernels.mla.mla_epilogue import Results
from dsa.kernels.mla.sparse_arguments import fake_arguments
from dsa.kernels.mla.sparse_mla_kernel import Coord, SparseMlaKernel
from dsa.kernels.mla.swap_ab_exchange import HeadRange, SwapAbExchange, SwapAbExchangeMemory, Thread
from dsa.runtime.compile_cache import cached, compile_sm90

# By the heads of a CTA.
SCORE_WARPGROUPS = {16: 2, 32: 2, 64: 1}
REGISTERS = {16: RoleRegisters(104, 104, 56), 32: RoleRegisters(104, 120, 32), 64: RoleRegisters(136, 176, 24)}
STAGES = {16: 4, 32: 4, 64: 3}  # tiles of bytes


@dataclass(frozen=True)
class Operands:
    """The products, and the layouts of Q and of P^T."""

    qk: QkMmas
    pv: cute.TiledMma
    q_layout: cute.ComposedLayout
    p_layout: cute.ComposedLayout


@dataclass(frozen=True)
class Shared:
    """kv: the address of the tiles of bytes."""

    pipeline: Fp8KvPipeline
    exchange: SwapAbExchange
    kv: Int32


class SparseMlaFp8KvSm90(SparseMlaKernel):
    """Keys of `head_dim` channels; `head_tile` heads of a CTA."""

    def __init__(self, head_dim: int, head_tile: int):
        score_warpgroups = SCORE_WARPGROUPS[head_tile]
        kv = Fp8TopkGather(head_dim, head_tile, STAGES[head_tile], score_warpgroups)
        exchange_memory = SwapAbExchangeMemory(None, head_dim, head_tile, score_warpgroups)
        super().__init__(kv, exchange_memory, head_tile, score_warpgroups, REGISTERS[head_tile])
        self.scores, self.values = Fp8KvScores(kv, head_tile), Fp8KvValues(kv, head_tile)

    def operand_storage(self) -> type:
        @cute.struct
        class OperandStorage:
            kv: cute.struct.Align[cute.struct.MemRange[Uint8, self.kv.stages * self.kv.stage_bytes], 128]

        return OperandStorage

    def operands(self) -> Operands:
        return Operands(self.scores.tiled_mmas(), self.values.tiled_mma(), *self.exchange_memory.layouts())

    def shared(self, storage, operands: Operands) -> Shared:
        return Shared(
            self.kv.pipeline(storage.pipeline),
            self.exchange_memory.exchange(storage.exchange, operands.q_layout, operands.p_layout),
            Int32(storage.operands.kv.data_ptr().toint()),
        )

    @cute.jit
    def score(self, q, results: Results, shared: Shared, operands: Operands, group, scale, coord: Coord):
        side = Int32(0) if const_expr(self.score_warpgroups == 1) else coord.warp // 4
        self.scores.score_mainloop(
            *(results, operands.qk, shared.kv, shared.pipeline, shared.exchange),
            *(HeadRange(coord.first_head, coord.heads), group, scale, Thread(side, coord.warp % 4, coord.lane)),
        )

    @cute.jit
    def output(self, results: Results, shared: Shared, operands: Operands, group, coord: Coord):
        thread = Thread(coord.warp // 4 - self.score_warpgroups, coord.warp % 4, coord.lane)
        self.values.output_mainloop(
            *(results, operands.pv, shared.kv, shared.pipeline, shared.exchange),
            *(HeadRange(coord.first_head, coord.heads), group, thread),
        )


@cached
def compile_sparse_mla_fp8_kv(head_dim: int, head_tile: int, lists: int):
    """-> f, see `SparseMlaKernel`, with q and out in bf16 and caches [pages, P, 656 | 584] of bytes; pages are
    contiguous; max_logits: None."""
    width = FP8_KV_BYTES[head_dim]

    def cache():
        return fake(Uint8, (cute.sym_int(), cute.sym_int(), width), (*strides(1, 16), width, 1))

    arguments = fake_arguments(BFloat16, head_dim, lists, cache, with_max_logits=False)
    return compile_sm90(SparseMlaFp8KvSm90(head_dim, head_tile), *arguments)


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_sparse_mla_fp8_kv, (head_dim, head_tile, lists))
        for head_dim in SPARSE_HEAD_DIMS
        for head_tile in FP8_KV_HEADS
        for lists in (1, 2)
    ]
