"""The shipped variants of sparse MLA attention and of its end compile to sm_90a: wgmma, gathers, no spills."""

from dsa.kernels.mla import mla_combine_sm90 as combine
from dsa.kernels.mla import selection_union_sm90 as selection_union
from dsa.kernels.mla import sparse_mla_cast_sm90 as cast
from dsa.kernels.mla import sparse_mla_fp8_kv_sm90 as fp8_kv
from dsa.kernels.mla import sparse_mla_queued_sm90 as queued
from dsa.kernels.mla import sparse_mla_sm90 as kernels
from dsa.kernels.mla import sparse_mla_swap_ab_sm90 as swap_ab
from dsa.kernels.mla import sparse_mla_union_sm90 as union
from dsa.kernels.mla.limits import HEAD_DIM, HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_attention import THREADS
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped

ALL = 65536 // 128  # registers of a multiprocessor, for each thread of a warpgroup


@shipped(kernels.compile_sparse_mla)
def test_sass(arguments):
    _, head_dim, *_ = arguments
    sass = disassemble(cubin(kernels.compile_sparse_mla, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and the two v chunks of a warpgroup's half of the value.
    assert sass.instructions["HGMMA"] == head_dim // K16 + 2 * TILE_N // K16
    # A warp gathers a k chunk of 64 channels of four keys at a time, and has 16 keys.
    assert sass.instructions["LDGSTS"] == head_dim // K_CHUNK * 4
    # wgmma reads a whole tile, or each k chunk, after a fence; the others fence Q, both halves of P, and the barriers.
    assert sass.instructions["FENCE"] == 1 + head_dim // K_CHUNK + 4
    assert sass.registers * THREADS <= 65536
    roles = kernels.REGISTERS
    assert roles.score + 2 * roles.output + roles.load <= ALL


@shipped(cast.compile_sparse_mla_cast)
def test_cast_sass(arguments):
    """As without the cast, but for the end."""
    dtype, lists, _ = arguments
    sass = disassemble(cubin(cast.compile_sparse_mla_cast, *arguments))
    without = disassemble(cubin(kernels.compile_sparse_mla, dtype, HEAD_DIM_V, lists, False))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    for name in ("HGMMA", "LDGSTS", "LDSM"):
        assert sass.instructions[name] == without.instructions[name]
    assert sass.registers * THREADS <= 65536
    # The largest of 128 channels is found by two exchanges within four lanes, for each of two rows and two groups; what
    # their values are multiplied by comes from one lane each.
    assert sass.instructions["SHFL"] == without.instructions["SHFL"] + 12


@shipped(swap_ab.compile_sparse_mla_swap_ab)
def test_swap_ab_sass(arguments):
    _, head_dim, *_ = arguments
    sass = disassemble(cubin(swap_ab.compile_sparse_mla_swap_ab, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and four products of 64 channels; with as little waiting as the compile-time order allows.
    assert sass.instructions["HGMMA"] == head_dim // K16 + 4 * TILE_N // K16
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    assert sass.instructions["LDGSTS"] == head_dim // K_CHUNK * 4
    # wgmma reads a whole tile, or each k chunk, after a fence; the others fence Q, P and the barriers.
    assert sass.instructions["FENCE"] == 1 + head_dim // K_CHUNK + 3
    warpgroups, roles = swap_ab.SCORE_WARPGROUPS + 3, swap_ab.REGISTERS
    assert sass.registers * warpgroups * 128 <= 65536
    given = swap_ab.SCORE_WARPGROUPS * roles.score + 2 * roles.output + roles.load
    assert given <= sass.registers * warpgroups


@shipped(union.compile_sparse_mla_union)
def test_union_sass(arguments):
    """As of queries by themselves: the same products with as little waiting, the same gathers."""
    dtype, head_dim, size = arguments
    sass = disassemble(cubin(union.compile_sparse_mla_union, *arguments))
    alone = disassemble(cubin(kernels.compile_sparse_mla, dtype, head_dim, 1, True))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    for name in ("HGMMA", "WARPGROUP", "LDGSTS", "LDSM", "FENCE"):
        assert sass.instructions[name] == alone.instructions[name]
    assert sass.registers * THREADS <= 65536
    # A vote for each query of a group whether it has selected the warps' keys, and one whether sums are finite.
    assert sass.instructions["VOTE"] == alone.instructions["VOTE"] + size + 1
    # A group that is to be computed otherwise is marked, and gets a place in the queue.
    assert sass.instructions["ATOMG"] == 2


@shipped(queued.compile_sparse_mla_queued)
def test_queued_sass(arguments):
    """As of all queries, but for three loads: how many are queued, and the first and each following one."""
    dtype, head_dim = arguments
    sass = disassemble(cubin(queued.compile_sparse_mla_queued, *arguments))
    whole = disassemble(cubin(swap_ab.compile_sparse_mla_swap_ab, dtype, head_dim, 16, 1, True))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    for name in ("HGMMA", "WARPGROUP", "LDGSTS", "VOTE"):
        assert sass.instructions[name] == whole.instructions[name]
    assert sass.instructions["LDG"] == whole.instructions["LDG"] + 3
    assert sass.registers == whole.registers


@shipped(selection_union.compile_selection_union)
def test_selection_union_sass(arguments):
    """Two CTAs a multiprocessor; four indices are under way at once in each of three passes."""
    (size,) = arguments
    sass = disassemble(cubin(selection_union.compile_selection_union, *arguments))
    assert sass.stack == 0 and sass.registers * selection_union.THREADS <= 65536 // 2
    assert sass.instructions["LDG"] >= 3 * size * selection_union.UNROLL


@shipped(fp8_kv.compile_sparse_mla_fp8_kv)
def test_fp8_kv_sass(arguments):
    head_dim, head_tile, _ = arguments
    sass = disassemble(cubin(fp8_kv.compile_sparse_mla_fp8_kv, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # Scores, and the four products of a warpgroup's half of the value.
    assert sass.instructions["HGMMA"] == head_dim // K16 + 4 * TILE_N // K16
    # Without registers to spare the assembler waits behind every product: two instructions more for each.
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    # A key, and a query's row for each stage; nothing is gathered but the scales of the layout that has them apart.
    assert sass.instructions["UBLKCP"] == (3 if head_tile == 64 else 2)
    assert sass.instructions["LDGSTS"] == (0 if head_dim == HEAD_DIM else 1)
    # The warpgroups share what the launch gives to all of them.
    score_warpgroups, roles = fp8_kv.SCORE_WARPGROUPS[head_tile], fp8_kv.REGISTERS[head_tile]
    assert sass.registers * (score_warpgroups + 3) * 128 <= 65536
    given = score_warpgroups * roles.score + 2 * roles.output + roles.load
    assert given <= sass.registers * (score_warpgroups + 3)


@shipped(combine.compile_sparse_mla_combine)
def test_combine_sass(arguments):
    sass = disassemble(cubin(combine.compile_sparse_mla_combine, *arguments))
    assert sass.stack == 0 and sass.registers <= 128
