"""The MLA cache in compiled graphs, and the dtypes and strides of the cache that a launch gets."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.case import same_bits

WRITE, READ = (next(x for x in cases_of("kv_cache") if x.op == op) for op in ("write_kv_cache", "read_kv_cache"))


@pytest.mark.parametrize("layout", ["bfloat16", "v32", "v4"])
def test_a_compiled_graph_reads_what_it_wrote(layout):
    given = WRITE.arguments(layout=layout, tokens=5)
    cache, slots, untouched = given["cache"], given["slots"], given["cache"].clone()

    def replace(kv, cache, slots, use_ue8m0):
        old = dsa.read_kv_cache(cache, slots)
        dsa.write_kv_cache(kv, cache, slots, use_ue8m0)
        return old, dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16)

    old, new = torch.compile(replace, fullgraph=True, backend="aot_eager")(**given)
    assert same_bits(old, dsa.read_kv_cache(untouched, slots))
    assert same_bits(new, dsa.read_kv_cache(cache, slots, dtype=torch.bfloat16))
    WRITE.check(given | {"cache": untouched}, [cache])


def test_bytes_of_every_dtype_and_exact_scales(launches):
    v32 = WRITE.arguments(layout="v32", tokens=5, dtype=torch.float32, use_ue8m0=False)
    v4 = READ.arguments(layout="v4", shape=(5,), dtype=torch.float32)
    launches.clear()  # making a V4 cache launches a kernel that fills it
    for dtype in (torch.int8, torch.float8_e4m3fn):
        dsa.write_kv_cache(**v32 | {"cache": v32["cache"].view(dtype)})
        dsa.read_kv_cache(**v4 | {"cache": v4["cache"].view(dtype)})
    assert [variant for variant, _ in launches] == [("float32", "v32", False), ("v4", "float32")] * 2
    assert all(arguments[1].dtype == torch.uint8 for _, arguments in launches)


def test_pages_of_floats_may_have_any_strides(launches):
    wide = torch.zeros(4, 3, 1, 48)
    dsa.write_kv_cache(torch.randn(5, 16), wide.transpose(0, 1)[..., 16:32], torch.arange(5))
    ((_, (_, pages, _)),) = launches
    assert pages.shape == (3, 4, 16) and pages.stride() == (48, 144, 1) and pages.storage_offset() == 16
