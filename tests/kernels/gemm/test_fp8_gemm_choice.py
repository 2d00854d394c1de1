"""The choice of kernel and tile for `fp8_gemm_nt`, which has one weight matrix (fp8_gemm_choice.py): a measured winner
from the tuning file, or else the tile with the shortest modelled time."""

import dataclasses
import itertools
import json

import pytest

from dsa.cute import tuning
from dsa.kernels.gemm import fp8_gemm_choice as choice
from dsa.kernels.gemm import fp8_gemm_config, fp8_gemm_few_rows_config
from dsa.kernels.gemm.fp8_gemm_config import Fp8GemmConfig
from dsa.kernels.gemm.fp8_gemm_few_rows_config import FewRowsConfig

OP = "fp8_gemm_nt"
SHIPPED = json.loads(tuning.path_of(OP, "sm_90").read_text())
SHAPES = [(8, 16), (576, 7168), (2112, 7168), (24576, 1536), (7168, 16384)]
EVERY_TILE = {*fp8_gemm_few_rows_config.CONFIGS, *fp8_gemm_config.ONE_MATRIX_CONFIGS}
by_winner = pytest.mark.parametrize("name", SHIPPED["winners"])


def sizes_of(name):
    return *map(int, name.split(" x ")), SHIPPED["multiprocessors"]


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        ([*itertools.product((1, 31, 32), SHAPES)], FewRowsConfig),
        ([*itertools.product((choice.MAX_ROWS + 1, 16384, 2**27), SHAPES)], Fp8GemmConfig),
        # For 33 to MAX_ROWS rows, the kernel depends on the number of work tiles, too.
        ([(64, (4096, 8192)), (128, (2112, 7168))], FewRowsConfig),
        ([(64, (12288, 6144)), (128, (4096, 2048)), (256, (4096, 8192)), (512, (24576, 1536))], Fp8GemmConfig),
    ],
)
def test_the_models_choose_the_kernel_by_rows_and_number_of_tiles(shapes, kind):
    assert all(isinstance(choice.modelled(rows, *matrix, 132), kind) for rows, matrix in shapes)


@pytest.mark.parametrize("sms", [1, 78, 132])
def test_every_shape_gets_an_existing_tile(sms):
    for rows, matrix in itertools.product((*choice.ROWS, 5, 33, 300, 20000, 2**27), SHAPES):
        assert choice.choose_for_one_matrix(rows, *matrix, sms) in EVERY_TILE


@pytest.mark.parametrize(
    ("name", "tile", "winning", "losing"),
    [
        # A winner for 128 rows applies to 97 to 128 rows, because 96 is the next smaller number in `choice.ROWS`. All
        # other sizes get the models' tile.
        (
            "128 x 4096 x 2048",
            Fp8GemmConfig(1, 1, 192, 5, 3),
            [(97, 4096, 2048, 132), (128, 4096, 2048, 132)],
            [(128, 4096, 2048, 114), (128, 4104, 2048, 132), (96, 4096, 2048, 132), (16385, 4096, 2048, 132)],
        ),
        # The tile has 128 rows for two warpgroups. With at most 64 rows in the last work tile, one warpgroup idles.
        # Then the models' tile is used.
        (
            "1024 x 576 x 7168",
            Fp8GemmConfig(2, 1, 64, 7, 1),
            [(1000, 576, 7168, 132), (1024, 576, 7168, 132)],
            [(rows, 576, 7168, 132) for rows in (769, 832, 900, 960)],
        ),
    ],
)
def test_a_winner_is_taken_for_the_rows_for_which_it_is_better(name, tile, winning, losing, monkeypatch):
    data = {"multiprocessors": 132, "winners": {name: dataclasses.asdict(tile)}}
    monkeypatch.setattr(tuning, "_data", lambda path: data)
    assert all(choice.choose_for_one_matrix(*sizes) == tile for sizes in winning)
    for sizes in losing:
        assert choice.choose_for_one_matrix(*sizes) == choice.modelled(*sizes) != tile


def test_a_class_of_shapes_is_named_for_its_largest_number_of_rows():
    assert [choice.shape_class(rows, 8, 16) for rows in (1, 33, 16384)] == [
        "1 x 8 x 16",
        "48 x 8 x 16",
        "16384 x 8 x 16",
    ]
    assert [*choice.ROWS] == sorted(choice.ROWS)


@by_winner
def test_no_row_of_a_class_gets_a_tile_that_is_far_worse(name):
    last, *matrix = sizes_of(name)
    before = max((rows for rows in choice.ROWS if rows < last), default=0)

    def slowdown(rows):
        tiles = choice.choose_for_one_matrix(rows, *matrix), choice.modelled(rows, *matrix)
        chosen, modelled = (choice.microseconds(tile, rows, *matrix) + 2.8 for tile in tiles)
        return chosen / modelled

    assert all(slowdown(rows) <= 1.06 * max(slowdown(last), 1) for rows in range(before + 1, last + 1))


@by_winner
def test_a_winner_is_a_tile_that_a_search_tries_and_the_models_do_not_choose(name):
    sizes = sizes_of(name)
    winner = choice.choose_for_one_matrix(*sizes)
    assert sizes[0] in choice.ROWS and winner != choice.modelled(*sizes) and choice.may_win(*sizes, winner)
    assert winner in EVERY_TILE


@pytest.mark.parametrize("config", [FewRowsConfig(8, 6), Fp8GemmConfig(1, 1, 64, 11, 1)])
def test_a_tile_on_trial_is_taken(config):
    sizes = 64, 7168, 16384
    with tuning.trial(OP, "sm_90", choice.shape_class(*sizes), config):
        assert choice.choose_for_one_matrix(*sizes, 132) == config


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        # The product has 128 blocks of channels, more than the MAX_SPLIT_BLOCKS that a cluster of CTAs can divide.
        ((8, 2112, 16384), FewRowsConfig(8, 5, 8)),
        ((100, 4096, 7168), Fp8GemmConfig(2, 2, 128, 4, 1)),  # 256 rows, more than twice as many as the product has
        ((16384, 24576, 1536), Fp8GemmConfig(1, 1, 48, 13, 1)),  # modelled to be 1.9 times as slow as the models' tile
        ((1024, 512, 7168), FewRowsConfig(64, 3)),
    ],
)
def test_a_search_skips_tiles_that_cannot_run_or_win(shape, config):
    assert not choice.may_win(*shape, 132, config)
