"""The launch of `fp8_mqa_logits` on the CPU: the stride of a single key."""

from dsa.cases import cases_of

CASE = cases_of("fp8_mqa_logits")[0]


def test_a_single_key_may_have_any_stride(launches):
    given = CASE.arguments(queries=5, keys=1)
    k, scale = given["kv"]
    CASE.run(given | {"kv": (k.as_strided((1, 32), (7, 1)), scale)})
    assert launches[0][1][1].stride() == (32, 1)
