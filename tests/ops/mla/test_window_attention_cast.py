"""`window_attention_cast_to_fp8` on the CPU: the arguments of the kernel."""

import torch

from dsa.cases import cases_of
from tests.reference.common import i32

CASE, _ = cases_of("window_attention_cast")
T, H, WINDOW = 9, 4, 6


def inputs():
    return CASE.arguments(sequences=((3, 5), (0, 4), (4, 11)), heads=H, groups=2, window=WINDOW, entries=9, top_k=5)


def test_the_window_alone_and_no_keys_at_all(named_launches):
    given = inputs() | dict.fromkeys(("compressed", "indices", "topk_length", "attn_sink"))
    near = i32([[0] * WINDOW] * T)
    CASE.run(given | {"window_indices": near})
    CASE.run(given | {"kv": given["kv"][:0]})
    (_, variant, window), (_, of_none, nothing) = named_launches
    assert variant == of_none == ("bfloat16", 1, True)
    assert window[2][0] is near and (window[4], window[6]) == (0, 0)
    # Without keys, the kernel gets a placeholder key, which no query selects.
    assert nothing[1][0].shape == (1, 1, 512) and nothing[2][0].eq(-1).all() and nothing[2][0].shape == (T, 1)


def test_queries_of_any_strides_are_copied_where_they_must_be(named_launches):
    given = inputs()
    wide = torch.randn(T, H, 520).bfloat16()
    CASE.run(given | {"q": wide[..., :512]})
    CASE.run(given | {"q": wide[..., 4:516]})
    used, copied = (launch[2][0] for launch in named_launches if launch[0] != "window_indices")
    assert (used.stride(0), used.stride(2), used.data_ptr()) == (H * 520, 520, wide.data_ptr())
    assert copied.data_ptr() != wide[..., 4:].data_ptr() and torch.equal(copied[:, 0], wide[..., 4:516])
