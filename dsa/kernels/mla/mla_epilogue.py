"""The epilogues of MLA attention without swap A/B: write LSE and O.

`Epilogue` writes O and LSE. For a work tile that covers all keys of a query or sequence, they go to the results. For a
split, they are a partial result: O is normalised by the sum over the split's keys, and the combine kernels compute the
split's weight from its LSE.

`CastEpilogue` casts O to FP8 for the next GEMM: it writes O, rotated back, in e4m3 with scales, and no LSE. First it
rounds O to q's dtype, as `Epilogue` does. Then it rotates the last 64 channels by the negative angle of the query's
position and rounds these channels again. Every 128 channels of a row get a scale. The bits equal those of
three separate kernels: attention that stores O, `apply_rotary` by the negative angle and `per_token_cast_to_fp8`.
But no 16-bit result goes through global memory.

A row is spread over the four lanes of a quad. A lane has 32 of each 128 channels, as pairs 8 channels apart. Output
warpgroup 1, which has the upper half of the channels, has all rotated channels. Both channels of a rotation pair are in
one lane.

Both epilogues stage O in P's memory, so that a lane stores 16 bytes at a time: 64 bytes of each of a warp's 16 rows,
which are 32 channels in 16 bits or 64 channels in e4m3. The 16-byte chunk c of row r is at position c ^ (r / 2 % 4),
which avoids bank conflicts. Partial results, in fp32, are stored directly.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.quantize import GROUP, amax_of, round_to, scale_and_reciprocal, store_pair
from dsa.cute.rounded import rotate_pair
from dsa.cute.shared_memory import load_16, pack, store_matrices
from dsa.cute.sm90 import LN2, opaque
from dsa.kernels.mla.limits import HEAD_DIM_V, ROTATED_BACK
from dsa.kernels.mla.mla_roles import QTile, Results, WorkTileInfo
from dsa.kernels.mla.mla_softmax import Exchange, SoftmaxState

HALF_V = HEAD_DIM_V // 2  # channels per output warpgroup
STAGED = 32  # channels of a row that `Epilogue` stages in shared memory at a time
OWN = GROUP // 4  # a lane's channels in each group; the GROUP channels of a group share a scale
ROW_BYTES = 64  # bytes of a row that `CastEpilogue` stages in shared memory at a time
ROTATED = ROTATED_BACK // 4  # rotated channels of a row per lane


class Epilogue:
    """Write LSE and O (in `dtype`, q's dtype), and the maximum logits if `with_max_logits`."""

    def __init__(self, dtype: type[cutlass.Numeric], with_max_logits: bool = False):
        self.dtype, self.with_max_logits = dtype, with_max_logits

    @cute.jit
    def write_lse(
        self,
        results: Results,
        exchange: Exchange,
        work: WorkTileInfo,
        q_tile: QTile,
        state: SoftmaxState,
        r: cutlass.Constexpr,
        tile_row,
        lane,
    ):
        """Write LSE of row `tile_row`, the lane's r-th row, and the row's maximum logit if `with_max_logits`. Also
        write `Exchange.inverse`, the factor by which the output warpgroups multiply O.

        LSE is a natural logarithm and does not include the attention sink. The LSE of a row without keys is +inf. In a
        split it is -inf, so that the combine kernel gives the split weight 0.
        """
        row = opaque(q_tile.first_row + tile_row)
        row_sum = state.whole_sum(r)
        inverse, lse = Float32(0.0), Float32(float("inf"))
        if work.split_idx >= 0:
            lse = -Float32(float("inf"))
        if row_sum != 0.0:
            whole = row_sum
            if const_expr(results.sink is not None):
                if work.split_idx < 0:
                    whole += cute.math.exp2(results.sink[tile_row] - state.row_max[r])
            inverse = 1.0 / whole
            lse = state.row_max[r] * LN2 + cute.math.log(row_sum)
        if lane % 4 == 0:
            exchange.inverse[tile_row] = inverse
            if const_expr(results.lse is not None):
                if q_tile.has_row(work.batch_idx, row):
                    if work.split_idx >= 0:
                        results.lse_partial[work.split_idx, q_tile.kv_head, row] = lse
                    else:
                        sequence, query, head = q_tile.coord(work.batch_idx, row)
                        results.lse[sequence, head, query] = lse
                        if const_expr(self.with_max_logits):
                            results.max_logits[sequence, head] = state.max_logits[r] * LN2

    @cute.jit
    def store(self, acc, upper, lower, results: Results, coords, rows, staging, side, lane):
        """Write a warp's 16 rows x 256 channels of O to `results.out`, staged in 1 KiB of P's memory.

        acc           the lane's elements of O
        upper, lower  factors by which the lane's first and second row of O are multiplied
        coords        (sequence, query, head) of the two rows
        rows          number of valid rows from the lane's first row on; the second row is 8 further
        staging       the warp's 1 KiB
        """
        targets = [results.out[*coord, None] for coord in coords]
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for i in cutlass.range_constexpr(HALF_V // STAGED):
            for j in cutlass.range_constexpr(2):
                at = (4 * i + 2 * j) * 4
                words = []
                for n in cutlass.range_constexpr(4):
                    inverse = lower if const_expr(n % 2) else upper
                    words.append(pack(acc[at + 2 * n] * inverse, acc[at + 2 * n + 1] * inverse, self.dtype))
                place = self.staged(lane % 16, 2 * j + lane // 16)
                store_matrices(Int32((staging + place).toint()), words)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(2):
                source = cute.make_tensor(staging + self.staged(lane // 4 + 8 * r, lane % 4), cute.make_layout(8))
                cute.autovec_copy(source, vector)
                if 8 * r < rows:
                    place = side * (HALF_V // 8) + i * (STAGED // 8) + lane % 4
                    cute.autovec_copy(vector, cute.local_tile(targets[r], (8,), (place,)))
            cute.arch.sync_warp()

    @cute.jit
    def staged(self, row, vector):
        """Return the offset in elements of vector `vector` (8 elements) of a staged row, swizzled against bank
        conflicts."""
        return row * STAGED + (vector ^ (row // 2 % 4)) * 8

    @cute.jit
    def store_partial(self, acc, upper, lower, targets, rows, side, lane):
        """Write a warp's 16 rows x 256 channels of a partial result, in fp32 and without staging.

        targets: the lane's two rows of the partial result. The other arguments are as in `store`.
        """
        pair = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(HALF_V // 8):
            for r in cutlass.range_constexpr(2):
                inverse = lower if const_expr(r) else upper
                pair[0], pair[1] = acc[4 * i + 2 * r] * inverse, acc[4 * i + 2 * r + 1] * inverse
                if 8 * r < rows:
                    place = side * (HALF_V // 2) + 4 * i + lane % 4
                    cute.autovec_copy(pair, cute.local_tile(targets[r], (2,), (place,)))


@dataclass(frozen=True)
class CastResults:
    """The outputs and the rotary tables of a kernel with a CastEpilogue. Such a kernel has no splits and writes no LSE.

    out          [G, T, h / G, 512] e4m3: T tokens, whose h heads are divided into G groups of adjacent heads
    scale        [G, T, h / G, 4] fp32
    cos, sin     [T, 32] fp32: inputs, the cosines and sines of each token's 32 angles
    group_heads  h / G as a divisor
    sink         as in `Results`
    """

    out: cute.Tensor
    scale: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    group_heads: cute.FastDivmodDivisorV2
    sink: cute.Tensor | None = None
    lse: ClassVar[None] = None
    out_partial: ClassVar[None] = None


class CastEpilogue(Epilogue):
    """Round O to `dtype`, rotate its last ROTATED_BACK channels back, and cast it to e4m3 with a scale per GROUP
    channels. use_ue8m0: round the scales up to powers of two."""

    def __init__(self, dtype: type[cutlass.Numeric], use_ue8m0: bool):
        super().__init__(dtype)
        self.use_ue8m0 = use_ue8m0

    @cute.jit
    def store(self, acc, upper, lower, results: CastResults, coords, rows, staging, side, lane):
        for i in cutlass.range_constexpr(HALF_V // 2):
            acc[i] = acc[i] * (lower if const_expr(i // 2 % 2) else upper)
        round_to(acc, self.dtype)
        if side == 1:
            self.rotate_back(acc, results, coords[0][0], lane)
        self.quantize(acc, results, coords, rows, side, lane)
        out = [self.channels_of(results.out, results, coord) for coord in coords]
        start = Int32(staging.toint())
        vector = cute.make_rmem_tensor((4,), Uint32)
        for i in cutlass.range_constexpr(HALF_V // ROW_BYTES):
            for r in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(ROW_BYTES // 8):
                    at = 4 * (ROW_BYTES // 8 * i + n) + 2 * r
                    place = self.staged_bytes(lane // 4 + 8 * r, n // 2) + n % 2 * 8 + lane % 4 * 2
                    store_pair(start + place, acc[at], acc[at + 1])
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(2):
                loaded = load_16(start + self.staged_bytes(lane // 4 + 8 * r, lane % 4))
                for k in cutlass.range_constexpr(4):
                    vector[k] = loaded[k]
                if 8 * r < rows:
                    place = side * (HALF_V // 16) + i * (ROW_BYTES // 16) + lane % 4
                    target = cute.local_tile(out[r], (16,), (place,))
                    cute.autovec_copy(cute.recast_tensor(vector, results.out.element_type), target)
            cute.arch.sync_warp()

    @cute.jit
    def quantize(self, acc, results: CastResults, coords, rows, side, lane):
        """Divide `acc` by the scales of the groups of channels, and write the scales. A group is 128 channels of a row.

        A quad has two rows, with two groups each in this warpgroup. Each of the quad's four lanes computes the scale of
        one group. If every lane computed all four scales, registers would spill, because a division takes many
        registers.
        """
        groups = cute.make_layout((2, OWN // 2), stride=(1, 4))
        own = [cute.make_tensor(acc.iterator + (2 * OWN * (n % 2) + 2 * (n // 2)), groups) for n in range(4)]
        maxima = [amax_of(own[n], OWN) for n in range(4)]
        of_quad = lane % 4
        upper_row = maxima[1] if of_quad == 1 else maxima[0]
        lower_row = maxima[3] if of_quad == 3 else maxima[2]
        scale, reciprocal = scale_and_reciprocal(lower_row if of_quad > 1 else upper_row, self.use_ue8m0)
        if 8 * (of_quad // 2) < rows:
            head = coords[1][2] if of_quad > 1 else coords[0][2]
            scales = self.channels_of(results.scale, results, (*coords[0][:2], head))
            scales[side * (HALF_V // GROUP) + of_quad % 2] = scale
        for n in cutlass.range_constexpr(4):
            factor = cute.arch.shuffle_sync(reciprocal, offset=lane // 4 * 4 + n)
            for i in cutlass.range_constexpr(OWN):
                own[n][i] = own[n][i] * factor

    @cute.jit
    def channels_of(self, x, results: CastResults, coord):
        """Return row `coord`, (token, 0, head), of x, which is `results.out` or `results.scale`."""
        token, _, head = coord
        group, of_group = divmod(head, results.group_heads)
        return x[group, token, of_group, None]

    @cute.jit
    def staged_bytes(self, row, vector):
        """Return the byte offset of the 16-byte chunk `vector` of a staged row, swizzled against bank conflicts."""
        return row * ROW_BYTES + (vector ^ (row // 2 % 4)) * 16

    @cute.jit
    def rotate_back(self, acc, results: CastResults, token, lane):
        """Rotate the last ROTATED_BACK channels of O by the negative angle of `token`, to which all rows belong.
        Adjacent channels are a pair. Called by output warpgroup 1, which has these channels."""
        rotated = cute.make_tensor(acc.iterator + (HALF_V // 2 - 2 * ROTATED), cute.make_layout(2 * ROTATED))
        for i in cutlass.range_constexpr(ROTATED // 2):
            pair = 4 * i + lane % 4
            cos, sin = results.cos[token, pair], results.sin[token, pair]
            for at in cutlass.range_constexpr(4 * i, 4 * i + 4, 2):
                rotated[at], rotated[at + 1] = rotate_pair(rotated[at], rotated[at + 1], cos, -sin)
        round_to(rotated, self.dtype)
