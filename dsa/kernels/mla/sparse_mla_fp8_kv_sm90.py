"""Sparse MLA decoding over selected latent keys of an FP8 cache, for any number of heads (swap A/B).

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[j]) k[j, :512]

The sum runs over the selected keys j of query t. q and k have 576 or 512 channels.

Swap A/B: S^T = K Q^T and O^T += V^T P^T. So keys are operand A of both wgmma products, and operand A can be in
registers: a lane reads FP8 bytes from shared memory and converts them in registers. No 16-bit copy of the keys is ever
stored.
Work, scheduler, launch: sparse_mla_kernel.py; 16, 32 or 64 heads per CTA.
Warp roles
- Load (one warpgroup): gathers the FP8 bytes (fp8_kv_gather.py).
- Score (one or two warpgroups): computes S^T of 64 keys by wgmma with Q in shared memory, and the softmax, and writes
  P^T to shared memory (fp8_kv_scores.py).
- Output (two warpgroups): each accumulates 256 channels x `head_tile` of O^T (fp8_kv_values.py).
Score and output warpgroups both read and convert the FP8 bytes.
Precision: all products of e4m3 values are wgmmas of f16, in which e4m3 is exact; one instruction converts two values.
Scales multiply the products of S in fp32. They multiply V in f16, as factors: with 576 channels a factor is a sum of
two f16, and with 512 channels it is a power of two (ScaleTable in swap_ab_exchange.py).
Shared memory: Q, two stages of P^T and of ScaleTables, STAGES tiles of FP8 bytes.
Registers, summed over one thread per warpgroup: 512 for 64 heads, with four warpgroups; 472 and 480 for 16
and 32 heads, with five.
Constraints: limits.py; q in bf16; pages are contiguous and start at multiples of 16 bytes.
Roofline: per tile of keys with 576 channels, and with 64 heads, wgmma takes 2176 cycles. Shared memory takes 2140: it
delivers 82 KiB of FP8 bytes, 72 KiB of Q and 64 KiB of P^T, and receives 41 KiB of FP8 bytes and 8 KiB of P^T. DRAM
takes 2300 cycles to deliver a tile to every SM.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint8

from dsa.cute.fake_tensors import fake, strides
from dsa.kernels.mla.fp8_kv_gather import Fp8TopkGather
from dsa.kernels.mla.fp8_kv_scores import Fp8KvScores
from dsa.kernels.mla.fp8_kv_values import Fp8KvValues
from dsa.kernels.mla.limits import FP8_KV_BYTES, FP8_KV_HEADS, SPARSE_HEAD_DIMS
from dsa.kernels.mla.mla_roles import MlaShared, RoleRegisters
from dsa.kernels.mla.sparse_mla_kernel import fake_arguments
from dsa.runtime.compile_cache import cached, compile_sm90

# Keyed by the heads per CTA.
SCORE_WARPGROUPS = {16: 2, 32: 2, 64: 1}
REGISTERS = {16: RoleRegisters(104, 104, 56), 32: RoleRegisters(104, 120, 32), 64: RoleRegisters(136, 176, 24)}
STAGES = {16: 4, 32: 4, 64: 3}  # tiles of FP8 bytes


class SparseMlaFp8KvSm90(Fp8KvScores, Fp8KvValues):
    """Sparse MLA over FP8 keys of `head_dim` channels, with `head_tile` heads per CTA."""

    def __init__(self, head_dim: int, head_tile: int):
        kv = Fp8TopkGather(head_dim, head_tile, STAGES[head_tile], SCORE_WARPGROUPS[head_tile])
        super().__init__(kv, head_tile, REGISTERS[head_tile])

    def operand_storage(self) -> type:
        @cute.struct
        class OperandStorage:
            kv: cute.struct.Align[cute.struct.MemRange[Uint8, self.kv.stages * self.kv.stage_bytes], 128]

        return OperandStorage

    def tiled_mmas(self) -> tuple[list[cute.TiledMma], cute.TiledMma]:
        return self.score_mmas(), self.value_mma()

    def shared(self, storage) -> MlaShared:
        return MlaShared(
            self.kv.pipeline(storage.pipeline),
            self.exchange_memory.exchange(storage.exchange),
            Int32(storage.operands.kv.data_ptr().toint()),
        )


@cached
def compile_sparse_mla_fp8_kv(head_dim: int, head_tile: int, lists: int):
    """Compile f, see `SparseMlaKernel`, with q and out in bf16, for any number of heads.

    Caches are uint8 [pages, P, n], with n = 656 bytes per key for head_dim 576 and n = 584 for head_dim 512. Pages are
    contiguous; max_logits is None.
    """
    width = FP8_KV_BYTES[head_dim]
    return compile_sm90(
        SparseMlaFp8KvSm90(head_dim, head_tile),
        *fake_arguments(
            *(BFloat16, head_dim, lists),
            cache=lambda: fake(Uint8, (cute.sym_int(), cute.sym_int(), width), (*strides(1, 16), width, 1)),
            with_max_logits=False,
        ),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [
        (compile_sparse_mla_fp8_kv, (head_dim, head_tile, lists))
        for head_dim in SPARSE_HEAD_DIMS
        for head_tile in FP8_KV_HEADS
        for lists in (1, 2)
    ]
