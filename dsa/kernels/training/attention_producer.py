"""The producer warps of dense attention, and the shared memory that they fill. One loads queries, keys and values by
TMA, one puts zeros over the values that belong to no key of the sequence."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsa.cute.pipeline import start
from dsa.cute.shared_memory import store_16
from dsa.kernels.training.attention_scheduler import INFO_STAGES, Info

STAGES = 2  # of keys, and of values


@dataclass(frozen=True)
class Loads:
    """TMA loads of queries, keys and values: atoms, and the tensors [tokens, channels, heads] as they take them."""

    q: cute.CopyAtom
    mq: cute.Tensor
    k: cute.CopyAtom
    mk: cute.Tensor
    v: cute.CopyAtom
    mv: cute.Tensor


@dataclass(frozen=True)
class SharedTensors:
    """q [rows, d, stage], k [keys, d, stage], v [keys, dv, stage]; info [fields, stage] of work tiles."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    info: cute.Tensor


class AttentionProducer:
    """Tiles of `rows` queries of `dim` numbers of `width` bytes, `q_stages` of them; blocks of `keys` keys, and of
    values of `value_dim` numbers.

    The barriers' addresses are made where they are used: made once, before the loops, they would be in registers."""

    def __init__(self, rows: int, keys: int, dim: int, value_dim: int, width: int, q_stages: int):
        self.q_stages, self.rows, self.keys, self.dim, self.value_dim, self.width = (
            q_stages,
            rows,
            keys,
            dim,
            value_dim,
            width,
        )

    @cute.jit
    def load(self, storage, loads: Loads, shared: SharedTensors):
        """The loading warp: all work tiles of this CTA."""
        q_bytes, k_bytes = self.rows * self.dim * self.width, self.keys * self.dim * self.width
        v_bytes = self.keys * self.value_dim * self.width
        info, tile_state = shared.info, start()
        q_state, k_state, v_state = start(), start(), start()
        blocks = Int32(1)
        while blocks > 0:
            at = tile_state.stage
            cute.arch.mbarrier_wait(storage.info_full.data_ptr() + at, tile_state.phase)
            blocks, query, head = info[Info.BLOCKS, at], info[Info.QUERY, at], info[Info.HEAD, at]
            key, kv_head, value_rows = info[Info.KEY, at], info[Info.KV_HEAD, at], info[Info.VALUE_ROWS, at]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.info_empty.data_ptr() + at)
            tile_state = tile_state.advance(INFO_STAGES)
            if blocks > 0:
                tq, gq = blocks_of(loads.q, loads.mq, shared.q, query, head, (self.rows, self.dim))
                tk, gk = blocks_of(loads.k, loads.mk, shared.k, key, kv_head, (self.keys, self.dim))
                tv, gv = blocks_of(loads.v, loads.mv, shared.v, key, kv_head, (self.keys, self.value_dim))
                cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + q_state.stage, q_state.phase ^ 1)
                full = storage.q_full.data_ptr() + q_state.stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, q_bytes)
                cute.copy(loads.q, gq[None, 0], tq[None, q_state.stage], tma_bar_ptr=full)
                q_state = q_state.advance(self.q_stages)
                for i in cutlass.range(blocks, unroll=1):
                    n = blocks - 1 - i
                    cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + k_state.stage, k_state.phase ^ 1)
                    k_full = storage.k_full.data_ptr() + k_state.stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full, k_bytes)
                    cute.copy(loads.k, gk[None, n], tk[None, k_state.stage], tma_bar_ptr=k_full)
                    k_state = k_state.advance(STAGES)
                    cute.arch.mbarrier_wait(storage.v_empty.data_ptr() + v_state.stage, v_state.phase ^ 1)
                    v_full = storage.v_full.data_ptr() + v_state.stage
                    if i == 0 and value_rows < self.keys:
                        v_full = storage.v_loaded.data_ptr() + v_state.stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(v_full, v_bytes)
                    cute.copy(loads.v, gv[None, n], tv[None, v_state.stage], tma_bar_ptr=v_full)
                    v_state = v_state.advance(STAGES)

    @cute.jit
    def clear(self, storage, shared: SharedTensors, lane):
        """The clearing warp: zeros over the rows of the last block of values that no key of the sequence has, as
        0 * NaN is NaN."""
        info, tile_state = shared.info, start()
        blocks, stage, phases = Int32(1), Int32(0), Int32(0)
        while blocks > 0:
            cute.arch.mbarrier_wait(storage.info_full.data_ptr() + tile_state.stage, tile_state.phase)
            blocks, value_rows = info[Info.BLOCKS, tile_state.stage], info[Info.VALUE_ROWS, tile_state.stage]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.info_empty.data_ptr() + tile_state.stage)
            tile_state = tile_state.advance(INFO_STAGES)
            if blocks > 0:
                if value_rows < self.keys:
                    cute.arch.mbarrier_wait(storage.v_loaded.data_ptr() + stage, (phases >> stage) & 1)
                    phases = phases ^ (1 << stage)
                    self.clear_values(shared.v, stage, value_rows, lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(storage.v_full.data_ptr() + stage)
                stage = (stage + blocks) % STAGES

    @cute.jit
    def clear_values(self, values: cute.Tensor, stage, first, lane):
        """Zeros over the rows from `first` on of a stage of values [keys, value_dim, stage], which lie in blocks of 64
        columns, a row's 128 bytes of a block after another's. A warp's work."""
        zero = Uint32(0)
        start = Int32(values.iterator.toint()) + stage * (self.keys * self.value_dim * 2)
        for block in cutlass.range_constexpr(self.value_dim // 64):
            for place in cutlass.range(first * 8 + lane, self.keys * 8, 32, unroll=1):
                store_16(start + block * (self.keys * 128) + place * 16, [zero, zero, zero, zero])


@cute.jit
def blocks_of(atom: cute.CopyAtom, x: cute.Tensor, shared: cute.Tensor, row, head, shape: cutlass.Constexpr):
    """Shared memory [., stage] and the blocks [., n] of a head's rows from `row` on, as the TMA load takes them."""
    blocks = cute.local_tile(cute.domain_offset((row, 0), x[None, None, head]), shape, (None, 0))
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )
