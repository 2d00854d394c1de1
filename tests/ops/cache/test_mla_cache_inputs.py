"""`write_mla_cache` launches its kernel only if there is something to write."""

import dsa
from dsa.cases import cases_of

CASE = cases_of("mla_cache_inputs")[0]


def test_nothing_to_do_is_not_launched(launches):
    dsa.write_mla_cache(**CASE.arguments(tokens=0))
    given = CASE.arguments(tokens=5)
    given["cache"], given["slots"] = given["cache"][:0], given["slots"].fill_(-1)
    dsa.write_mla_cache(**given | {"out": None})
    assert launches == []
    dsa.write_mla_cache(**given)
    assert len(launches) == 1
