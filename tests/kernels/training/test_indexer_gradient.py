"""Every shipped variant of the indexer's training kernels compiles to sm_90a: wgmma in groups, TMA, no spills."""

from dsa.cute.sm90 import SHARED_BYTES
from dsa.kernels.training import indexer_key_grad_sm90, indexer_query_grad_sm90, indexer_scores_sm90
from dsa.kernels.training.limits import Q_TILE
from dsa.kernels.training.q_tiles import COLUMN_BLOCK
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


def sass_of(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    return sass.instructions


@shipped(indexer_scores_sm90.compile_indexer_scores)
def test_scores(arguments):
    _, dim, config = arguments
    instructions = sass_of(indexer_scores_sm90.compile_indexer_scores, arguments)
    assert instructions["HGMMA"] == dim // 16 and instructions["UTMALDG"] == 2 * (dim // 64)
    # One multiply-add an accumulator, and one shift for its sign; an arrival and a wait for all of a tile's wgmma.
    assert instructions["FFMA"] == config.columns // 2 and instructions["SHF"] >= config.columns // 2
    assert instructions["WARPGROUP"] == 2
    assert config.shared(dim) <= SHARED_BYTES


@shipped(indexer_query_grad_sm90.compile_indexer_query_grad)
def test_query_grad(arguments):
    heads, dim, config = arguments
    instructions = sass_of(indexer_query_grad_sm90.compile_indexer_query_grad, arguments)
    # For each half of 128 keys: 4 wgmma and an arrival a group, and one wait for all.
    assert instructions["HGMMA"] == 2 * config.blocks * 4
    assert instructions["WARPGROUP"] == 2 * (config.blocks + 1)
    assert config.shared(heads, dim) <= SHARED_BYTES
    # dI of a work tile's rows is copied at once: they are in one of a tile's two parts of 64 rows.
    assert Q_TILE // 2 * heads % (config.column_blocks * COLUMN_BLOCK) == 0


@shipped(indexer_key_grad_sm90.compile_indexer_key_grad)
def test_key_grad(arguments):
    heads, dim, config = arguments
    instructions = sass_of(indexer_key_grad_sm90.compile_indexer_key_grad, arguments)
    # 64 keys, or 128: 4 wgmma and an arrival for each 64, and a wait.
    assert instructions["HGMMA"] == 4 + 8 and instructions["WARPGROUP"] == 2 + 3
    assert config.shared(heads, dim) <= SHARED_BYTES
