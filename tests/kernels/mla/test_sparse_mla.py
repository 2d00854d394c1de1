"""SASS of the sparse MLA attention kernels. The assembler adds no waits between wgmma. cp.async gathers the keys. The
registers of all warp roles together fit the register file."""

from dsa.kernels.mla import selection_union_sm90 as selection_union
from dsa.kernels.mla import sparse_mla_cast_sm90 as cast
from dsa.kernels.mla import sparse_mla_fp8_kv_sm90 as fp8_kv
from dsa.kernels.mla import sparse_mla_narrow_sm90 as narrow
from dsa.kernels.mla import sparse_mla_queued_sm90 as queued
from dsa.kernels.mla import sparse_mla_sm90 as kernels
from dsa.kernels.mla import sparse_mla_swap_ab_sm90 as swap_ab
from dsa.kernels.mla import sparse_mla_union_sm90 as union
from dsa.kernels.mla.limits import HEAD_DIM, HEAD_DIM_V, TILE_N
from dsa.kernels.mla.mla_tiles import K16, K_CHUNK
from tests.kernels.variants import assert_counts, sass_of, shipped

PER_THREAD = 65536 // 128  # limit of the registers per thread, summed over the warpgroups of an SM


def counts_of(sass, *names):
    return {name: sass.instructions[name] for name in names}


@shipped(kernels.compile_sparse_mla)
def test_sass(sass, arguments):
    _, head_dim, *_ = arguments
    # Products: scores, and O += P V for the two v chunks (128 channels each) of an output warpgroup.
    assert_counts(sass, HGMMA=head_dim // K16 + 2 * TILE_N // K16)
    # An LDGSTS gathers a k chunk (64 channels) of four keys. A warp gathers 16 keys of a tile.
    assert_counts(sass, LDGSTS=head_dim // K_CHUNK * 4)
    # Before wgmma reads gathered keys: one fence for a whole tile, or one per k chunk. The code contains both cases.
    # The 4 others: Q, the two halves of P, and the mbarriers.
    assert_counts(sass, FENCE=1 + head_dim // K_CHUNK + 4)
    roles = kernels.REGISTERS
    assert roles.score + 2 * roles.output + roles.load <= PER_THREAD


@shipped(narrow.compile_narrow_sparse_mla)
def test_narrow_sass(sass, arguments):
    _, dim, dim_v, warps, _ = arguments
    # Half of the steps of Q K^T, which are a loop of two iterations, and all of P V. An HMMA has 16 heads and 8 keys or
    # channels; an LDSM of keys serves both blocks of heads.
    steps, blocks = dim // 16 // 2, narrow.M_BLOCKS
    products = steps * (narrow.KEYS // 8), narrow.KEYS // 16 * (dim_v // 8)
    assert_counts(sass, HMMA=blocks * sum(products), LDSM=steps * blocks + sum(products) // 2)
    # Copies of Q, of a warp's first tile, and of the next tile.
    chunks = 2 * dim // narrow.VECTOR
    assert_counts(sass, LDGSTS=-(-narrow.HEADS * chunks // (32 * warps)) + 2 * chunks)


@shipped(cast.compile_sparse_mla_cast)
def test_the_cast_changes_the_epilogue_only(sass, arguments):
    dtype, lists, _ = arguments
    plain = sass_of(kernels.compile_sparse_mla, dtype, HEAD_DIM_V, lists, False)
    # A lane has two groups in each of two rows. A group is in four lanes, so two shuffles find its largest magnitude. 4
    # more shuffles broadcast the groups' factors.
    assert_counts(sass, **counts_of(plain, "HGMMA", "LDGSTS", "LDSM"), SHFL=plain.instructions["SHFL"] + 12)


@shipped(swap_ab.compile_sparse_mla_swap_ab)
def test_swap_ab_sass(sass, arguments):
    _, head_dim, *_ = arguments
    # Products: scores, and O^T += V^T P^T for the four blocks of 64 channels of an output warpgroup.
    assert_counts(sass, HGMMA=head_dim // K16 + 4 * TILE_N // K16, LDGSTS=head_dim // K_CHUNK * 4)
    # One fence for a whole tile, or one per k chunk. The code contains both cases. The 3 others: Q, P and the
    # mbarriers.
    assert_counts(sass, FENCE=1 + head_dim // K_CHUNK + 3)
    check_roles(sass, swap_ab.SCORE_WARPGROUPS, swap_ab.REGISTERS)


def check_roles(sass, score_warpgroups, roles):
    """Check that the assembler has not added a wait after every wgmma. The launch must allocate enough registers for
    all roles."""
    warpgroups = score_warpgroups + 3
    assert sass.instructions["WARPGROUP"] < sass.instructions["HGMMA"]
    assert score_warpgroups * roles.score + 2 * roles.output + roles.load <= sass.registers * warpgroups


@shipped(union.compile_sparse_mla_union)
def test_a_union_has_the_products_and_gathers_of_a_single_query(sass, arguments):
    dtype, head_dim, size = arguments
    single = sass_of(kernels.compile_sparse_mla, dtype, head_dim, 1, True)
    assert_counts(sass, **counts_of(single, "HGMMA", "WARPGROUP", "LDGSTS", "LDSM", "FENCE"))
    # One vote per query of the group finds the warp's keys that the query selects. One more finds out whether all sums
    # are finite.
    assert_counts(sass, VOTE=single.instructions["VOTE"] + size + 1)
    # If a sum is not finite, two atomics mark the group and queue it. sparse_mla_queued_sm90.py computes its queries
    # one by one.
    assert_counts(sass, ATOMG=2)


@shipped(queued.compile_sparse_mla_queued)
def test_a_queue_adds_three_loads(sass, arguments):
    """The swap-A/B kernel lacks these loads: the queue's length, the first query, and each following query."""
    dtype, head_dim = arguments
    whole = sass_of(swap_ab.compile_sparse_mla_swap_ab, dtype, head_dim, 16, 1, True)
    same = counts_of(whole, "HGMMA", "WARPGROUP", "LDGSTS", "VOTE")
    assert_counts(sass, **same, LDG=whole.instructions["LDG"] + 3)
    assert sass.registers == whole.registers


@shipped(selection_union.compile_selection_union)
def test_selection_union_sass(sass, arguments):
    """The kernel reads the indices in three passes; in each pass a thread has UNROLL indices per query in flight."""
    (size,) = arguments
    assert sass.registers * selection_union.THREADS <= 65536 // 2  # allows two CTAs per SM
    assert sass.instructions["LDG"] >= 3 * size * selection_union.UNROLL


@shipped(fp8_kv.compile_sparse_mla_fp8_kv)
def test_fp8_kv_sass(sass, arguments):
    head_dim, head_tile, _ = arguments
    assert_counts(sass, HGMMA=head_dim // K16 + 4 * TILE_N // K16)
    # UBLKCP: one in the code for keys, and one for each stage of rows of Q (two with 64 heads, else one). Only the
    # layout of 512 channels has separate scales, which cp.async loads.
    assert_counts(sass, UBLKCP=3 if head_tile == 64 else 2, LDGSTS=0 if head_dim == HEAD_DIM else 1)
    check_roles(sass, fp8_kv.SCORE_WARPGROUPS[head_tile], fp8_kv.REGISTERS[head_tile])
