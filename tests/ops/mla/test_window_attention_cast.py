"""The bridge of windowed attention with a cast, on the CPU: the ops that it joins, and what it launches."""

import pytest
import torch

import dsa

T, KEYS, H, GROUPS, WINDOW, SCALE = 7, 20, 4, 2, 6, 0.05


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(heads=H, dtype=torch.bfloat16):
    """Everything by its name, of three sequences."""
    angles = torch.rand(T, 32) * 6
    return {
        "q": torch.randn(T, heads, 512).to(dtype),
        "kv": torch.randn(KEYS, 1, 512).to(dtype),
        "cu_seqlens_q": i32([0, 3, 3, 7]),
        "cu_seqlens_k": i32([0, 5, 9, 20]),
        "window": WINDOW,
        "compressed": torch.randn(9, 1, 512).to(dtype),
        "indices": torch.randint(-2, 11, (T, 5), dtype=torch.int32),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "groups": GROUPS,
        "softmax_scale": SCALE,
        "attn_sink": torch.randn(heads),
        "topk_length": i32([5, 0, 3, 9, -1, 1, 5]),
    }


def alone(given):
    return given | dict.fromkeys(("compressed", "indices", "topk_length"))


def apart(given, use_ue8m0=True):
    """Attention, rotation and cast, one after the other."""
    packed = [given[name] for name in ("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "window")]
    softmax = (given["softmax_scale"], 512, given["attn_sink"])
    if given["compressed"] is None:
        out, _ = dsa.sliding_window_attention(*packed, *softmax)
    else:
        lists = given["compressed"], given["indices"]
        out, _ = dsa.window_sparse_attention(*packed, *lists, *softmax, given["topk_length"])
    out = dsa.apply_rotary(out, given["cos"], -given["sin"], interleaved=True, dims="last")
    rows = out.unflatten(1, (given["groups"], -1)).transpose(0, 1).flatten(2).flatten(0, 1)
    return dsa.per_token_cast_to_fp8(rows, use_ue8m0)


def same(got, expected):
    assert all(torch.equal(g.view(torch.uint8), e.view(torch.uint8)) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_attention_rotation_and_cast(dtype, use_ue8m0):
    for given in (inputs(dtype=dtype), alone(inputs(dtype=dtype))):
        same(dsa.window_attention_cast_to_fp8(**given, use_ue8m0=use_ue8m0), apart(given, use_ue8m0))
        near = dsa.window_indices(given["cu_seqlens_q"], given["cu_seqlens_k"], T, WINDOW)
        got = dsa.window_attention_cast_to_fp8(**given, window_indices=near, use_ue8m0=use_ue8m0)
        same(got, apart(given, use_ue8m0))


def test_the_window_alone_and_no_keys_at_all(named_launches):
    given = alone(inputs()) | {"attn_sink": None}
    near = i32([[0] * WINDOW] * T)
    dsa.window_attention_cast_to_fp8(**given, window_indices=near)
    dsa.window_attention_cast_to_fp8(**(given | {"kv": given["kv"][:0]}))
    (_, variant, window), (_, of_none, nothing) = named_launches
    assert variant == of_none == ("bfloat16", 1, True)
    assert window[2][0] is near and (window[4], window[6]) == (0, 0)
    # One key, which nobody selects.
    assert nothing[1][0].shape == (1, 1, 512) and nothing[2][0].eq(-1).all() and nothing[2][0].shape == (T, 1)


def test_queries_of_any_strides_are_copied_where_they_must_be(named_launches):
    given = inputs()
    wide = torch.randn(T, H, 520).bfloat16()
    dsa.window_attention_cast_to_fp8(**(given | {"q": wide[..., :512]}))
    dsa.window_attention_cast_to_fp8(**(given | {"q": wide[..., 4:516]}))
    used, copied = (launch[2][0] for launch in named_launches if launch[0] != "window_indices")
    assert (used.stride(0), used.stride(2), used.data_ptr()) == (H * 520, 520, wide.data_ptr())
    assert copied.data_ptr() != wide[..., 4:].data_ptr() and torch.equal(copied[:, 0], wide[..., 4:516])
