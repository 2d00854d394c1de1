"""Which kernel and tile a product of one matrix gets: what was measured, else what the models say."""

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


@pytest.mark.parametrize("columns, channels", SHAPES)
def test_the_models_give_up_to_32_rows_to_the_kernel_of_few_rows(columns, channels):
    for rows in (1, 31, 32):
        assert isinstance(choice.modelled(rows, columns, channels, 132), FewRowsConfig)
    for rows in (choice.MAX_ROWS + 1, 16384, 2**27):
        assert isinstance(choice.modelled(rows, columns, channels, 132), Fp8GemmConfig)


def test_the_models_give_it_more_rows_where_a_matrix_has_few_tiles():
    few = [(64, 4096, 8192), (128, 2112, 7168)]
    many = [(64, 12288, 6144), (128, 4096, 2048), (256, 4096, 8192), (512, 24576, 1536)]
    for expected, shapes in ((FewRowsConfig, few), (Fp8GemmConfig, many)):
        assert all(isinstance(choice.modelled(*shape, 132), expected) for shape in shapes)


@pytest.mark.parametrize("multiprocessors", [1, 78, 132])
def test_every_shape_gets_a_tile_of_those_that_there_are(multiprocessors):
    everything = {*fp8_gemm_few_rows_config.CONFIGS, *fp8_gemm_config.ONE_MATRIX_CONFIGS}
    for rows, (columns, channels) in itertools.product((*choice.ROWS, 5, 33, 300, 20000, 2**27), SHAPES):
        assert choice.choose_for_one_matrix(rows, columns, channels, multiprocessors) in everything


def data_with(monkeypatch, **winners):
    data = {"multiprocessors": 132, "winners": winners}
    monkeypatch.setattr(tuning, "_data", lambda path: data)


def test_rows_have_the_tile_of_the_next_number_that_was_searched(monkeypatch):
    assert choice.shape_class(1, 8, 16) == "1 x 8 x 16" and choice.shape_class(33, 8, 16) == "48 x 8 x 16"
    assert choice.shape_class(16384, 8, 16) == "16384 x 8 x 16" and [*choice.ROWS] == sorted(choice.ROWS)
    tile = Fp8GemmConfig(1, 1, 192, 5, 3)
    data_with(monkeypatch, **{"128 x 4096 x 2048": dataclasses.asdict(tile)})
    for rows in (97, 128):
        assert choice.choose_for_one_matrix(rows, 4096, 2048, 132) == tile
    # Other GPUs, other matrices and other rows get what the models say.
    for sizes in ((128, 4096, 2048, 114), (128, 4104, 2048, 132), (96, 4096, 2048, 132), (16385, 4096, 2048, 132)):
        assert choice.choose_for_one_matrix(*sizes) == choice.modelled(*sizes) != tile


def test_a_tile_is_not_taken_for_rows_at_which_it_is_worse(monkeypatch):
    """Work tiles of 128 rows, of which the last has 64 or less: one of two warpgroups has nothing to do."""
    tile = Fp8GemmConfig(2, 1, 64, 7, 1)
    data_with(monkeypatch, **{"1024 x 576 x 7168": dataclasses.asdict(tile)})
    for rows in (1000, 1024):
        assert choice.choose_for_one_matrix(rows, 576, 7168, 132) == tile
    for rows in (769, 832, 900, 960):
        assert choice.choose_for_one_matrix(rows, 576, 7168, 132) == choice.modelled(rows, 576, 7168, 132) != tile


@pytest.mark.parametrize("name", SHIPPED["winners"])
def test_no_row_of_a_class_gets_a_tile_that_is_far_worse(name):
    last, *sizes = *map(int, name.split(" x ")), SHIPPED["multiprocessors"]
    before = max((rows for rows in choice.ROWS if rows < last), default=0)
    tiles = {rows: choice.choose_for_one_matrix(rows, *sizes) for rows in range(before + 1, last + 1)}

    def times(rows):
        own, modelled = tiles[rows], choice.modelled(rows, *sizes)
        return (choice.microseconds(own, rows, *sizes) + 2.8) / (choice.microseconds(modelled, rows, *sizes) + 2.8)

    assert all(times(rows) <= 1.06 * max(times(last), 1) for rows in tiles)


@pytest.mark.parametrize("name", SHIPPED["winners"])
def test_data_is_of_tiles_that_a_search_would_try_and_the_models_do_not_choose(name):
    sizes = *map(int, name.split(" x ")), SHIPPED["multiprocessors"]
    winner = choice.choose_for_one_matrix(*sizes)
    assert sizes[0] in choice.ROWS and winner != choice.modelled(*sizes) and choice.may_win(*sizes, winner)
    of_few = isinstance(winner, FewRowsConfig)
    module = fp8_gemm_few_rows_config if of_few else fp8_gemm_config
    assert winner in (module.CONFIGS if of_few else module.ONE_MATRIX_CONFIGS)


def test_a_tile_on_trial_is_taken():
    sizes = 64, 7168, 16384, 132
    for config in (FewRowsConfig(8, 6), Fp8GemmConfig(1, 1, 64, 11, 1)):
        with tuning.trial(OP, "sm_90", choice.shape_class(*sizes[:3]), config):
            assert choice.choose_for_one_matrix(*sizes) == config


def test_a_search_leaves_out_what_cannot_run_or_win():
    # Its cluster's shared memory has no room for 128 blocks of channels; 64 rows more than there are; too many tiles.
    assert not choice.may_win(8, 2112, 16384, 132, FewRowsConfig(8, 5, 8))
    assert not choice.may_win(100, 4096, 7168, 132, Fp8GemmConfig(2, 2, 128, 4, 1))
    assert not choice.may_win(16384, 24576, 1536, 132, Fp8GemmConfig(1, 1, 48, 13, 1))
    assert not choice.may_win(1024, 512, 7168, 132, FewRowsConfig(64, 3))
