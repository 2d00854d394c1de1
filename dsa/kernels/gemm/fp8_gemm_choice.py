"""The choice of kernel and work tile for `fp8_gemm_nt`, which has one weight matrix: the measured winner if there is
one, else the cost models' choice.

The two kernels are that of fp8_gemm_sm90.py and the small-M kernel (fp8_gemm_few_rows_sm90.py, with its split-K
variant). All their tiles give the same bits, so any of them may be chosen. `dsa tune fp8_gemm_nt` timed the tiles on an
H200 for the layers of published language models. For these shapes the tile that the models choose takes 1% longer than
the fastest on average, and 17% longer at worst. dsa/tuned/sm_90/fp8_gemm_nt.json contains a shape's fastest tile if the
models' tile is more than 1% slower. The file is valid for GPUs with as many SMs as the H200; other GPUs use the cost
models.
ROWS lists the numbers of rows that were timed. For another number of rows, the winner for the next larger number in
ROWS is used. If the cost models call that tile too slow (WORSE), the models' tile is used. A tile can be too slow if
few rows are left for the last work tile: then the product can take three times as long.
"""

from bisect import bisect_left

from dsa.cute.tuning import measured
from dsa.kernels.gemm import fp8_gemm_config, fp8_gemm_few_rows_config
from dsa.kernels.gemm.fp8_gemm_config import Fp8GemmConfig
from dsa.kernels.gemm.fp8_gemm_few_rows_config import FewRowsConfig

Tile = FewRowsConfig | Fp8GemmConfig
# Numbers of rows for which `dsa tune` searches the fastest tile.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
LAUNCH = 2.8  # microseconds of a launch, which the models' times exclude
# The models always choose the small-M kernel up to OWN_ROWS rows, and can choose it up to MAX_ROWS rows. The measured
# winners do not follow this: in five shape classes of up to 32 rows the other kernel is faster.
OWN_ROWS, MAX_ROWS = 32, 512
# The winner that was measured for class_rows(n) rows is used for n rows if r(n) <= WORSE * r(class_rows(n)). r(n) is
# `_times(winner, models' tile)` for n rows.
WORSE = 1.05


def choose_for_one_matrix(rows: int, columns: int, channels: int, multiprocessors: int) -> Tile:
    """Return the tile for a product of [rows, channels] and [columns, channels]. Its type determines the kernel."""
    chosen = modelled(rows, columns, channels, multiprocessors)
    if rows > ROWS[-1]:
        return chosen
    found = measured("fp8_gemm_nt", "sm_90", shape_class(rows, columns, channels), multiprocessors)
    if not isinstance(found, dict):
        return found or chosen
    tile = FewRowsConfig(**found) if "ctas" in found else Fp8GemmConfig(**found)
    sizes = columns, channels, multiprocessors
    searched = class_rows(rows)
    there = _times(tile, modelled(searched, *sizes), searched, *sizes)
    return tile if _times(tile, chosen, rows, *sizes) <= WORSE * there else chosen


def _times(tile: Tile, other: Tile, *sizes: int) -> float:
    """Return the modelled time of `tile` divided by that of `other`, both with LAUNCH."""
    return (microseconds(tile, *sizes) + LAUNCH) / (microseconds(other, *sizes) + LAUNCH)


def class_rows(rows: int) -> int:
    return ROWS[bisect_left(ROWS, rows)]


def shape_class(rows: int, columns: int, channels: int) -> str:
    """Return the key of a product in fp8_gemm_nt.json; `rows` is at most ROWS[-1]."""
    return f"{class_rows(rows)} x {columns} x {channels}"


def modelled(rows: int, columns: int, channels: int, multiprocessors: int) -> Tile:
    """Return the tile with the shortest modelled time. Up to OWN_ROWS rows it is a tile of the small-M kernel, since
    the other kernel's tiles have 64 rows or more."""
    sizes = rows, columns, channels, multiprocessors
    if rows > MAX_ROWS:
        return fp8_gemm_config.choose_one_config(*sizes)
    few = fp8_gemm_few_rows_config.choose_config(*sizes)
    if rows <= OWN_ROWS:
        return few
    many = fp8_gemm_config.choose_one_config(*sizes)
    return few if microseconds(few, *sizes) <= microseconds(many, *sizes) else many


def microseconds(config: Tile, rows: int, columns: int, channels: int, multiprocessors: int) -> float:
    """Return the modelled time of a product with this tile, without the launch."""
    model = fp8_gemm_config.microseconds_of_one
    if isinstance(config, FewRowsConfig):
        model = fp8_gemm_few_rows_config.microseconds
    return model(config, rows, columns, channels, multiprocessors)


def may_win(rows: int, columns: int, channels: int, multiprocessors: int, config: Tile) -> bool:
    """Whether a search tries this tile. It skips tiles that cannot run or have far too many rows. It skips tiles with
    more than 1.5 times the modelled time of the models' tile."""
    sizes = rows, columns, channels, multiprocessors
    if isinstance(config, FewRowsConfig):
        possible = rows <= MAX_ROWS and fp8_gemm_few_rows_config.can_run(config, *sizes)
    else:
        possible = config.rows < 2 * max(rows, 64)
    chosen = modelled(*sizes)
    least = microseconds(chosen, *sizes)
    return config == chosen or (possible and microseconds(config, *sizes) + LAUNCH <= 1.5 * (least + LAUNCH))
