"""Which kernel multiplies one matrix, and by which work tiles: what was measured to be fastest, else models of time.

Every tile of both kernels gives the same bits, so any of them may be taken. The models' tile takes 1% longer than the
fastest on average and 17% at worst. dsa/tuned has the fastest tile of those shapes of published models at which a
search found the models' to take more than 1% longer; a shape that is not there was not searched, or the models are
right. Such data is of a GPU with so many multiprocessors; others get what the models say.
A search is at some numbers of rows. Its tile is for fewer rows, too, down to the next such number, as far as the models
do not say that it is worse there: work tiles whose last rows are few can take three times as long.
"""

from bisect import bisect_left

from dsa.cute.tuning import measured
from dsa.kernels.gemm import fp8_gemm_config, fp8_gemm_few_rows_config
from dsa.kernels.gemm.fp8_gemm_config import Fp8GemmConfig
from dsa.kernels.gemm.fp8_gemm_few_rows_config import FewRowsConfig

Tile = FewRowsConfig | Fp8GemmConfig
# At which a search is.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
LAUNCH = 2.8  # microseconds, which the models leave out
OWN_ROWS, MAX_ROWS = 32, 512  # up to which the models give all to the kernel of few rows, and up to which some
WORSE = 1.05  # times as long, against the models' tile, as at the rows of the search


def choose_for_one_matrix(rows: int, columns: int, channels: int, multiprocessors: int) -> Tile:
    """The tile of a product of `rows` x channels and columns x channels; its type says whose it is."""
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
    """How many times as long as the other's the models say that the tile takes."""
    return (microseconds(tile, *sizes) + LAUNCH) / (microseconds(other, *sizes) + LAUNCH)


def class_rows(rows: int) -> int:
    """At which number of rows, of those up to ROWS[-1], a search is for so many."""
    return ROWS[bisect_left(ROWS, rows)]


def shape_class(rows: int, columns: int, channels: int) -> str:
    """What a product of up to ROWS[-1] rows is searched as."""
    return f"{class_rows(rows)} x {columns} x {channels}"


def modelled(rows: int, columns: int, channels: int, multiprocessors: int) -> Tile:
    """What takes the shortest time, as the kernels' models have it: of few rows the one kernel, since the other's tiles
    are of 64, of many the other."""
    sizes = rows, columns, channels, multiprocessors
    if rows > MAX_ROWS:
        return fp8_gemm_config.choose_one_config(*sizes)
    few = fp8_gemm_few_rows_config.choose_config(*sizes)
    if rows <= OWN_ROWS:
        return few
    many = fp8_gemm_config.choose_one_config(*sizes)
    return few if microseconds(few, *sizes) <= microseconds(many, *sizes) else many


def microseconds(config: Tile, rows: int, columns: int, channels: int, multiprocessors: int) -> float:
    """What the models say, without the launch."""
    model = fp8_gemm_config.microseconds_of_one
    if isinstance(config, FewRowsConfig):
        model = fp8_gemm_few_rows_config.microseconds
    return model(config, rows, columns, channels, multiprocessors)


def may_win(rows: int, columns: int, channels: int, multiprocessors: int, config: Tile) -> bool:
    """Whether a search has to try it: the models would have to be wrong by half for others."""
    sizes = rows, columns, channels, multiprocessors
    if isinstance(config, FewRowsConfig):
        possible = rows <= MAX_ROWS and fp8_gemm_few_rows_config.can_run(config, *sizes)
    else:
        possible = config.rows < 2 * max(rows, 64)
    chosen = modelled(*sizes)
    least = microseconds(chosen, *sizes)
    return config == chosen or (possible and microseconds(config, *sizes) + LAUNCH <= 1.5 * (least + LAUNCH))
