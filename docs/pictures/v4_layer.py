"""The data flow of a DeepSeek-V4 layer, with the sizes of Flash.

Source: dsa_layers/models/deepseek_v4.py, hyper_sublayer.py, compressed_attention.py, compressor.py,
compressed_indexer.py, linear.py, moe.py.
"""

from canvas import Canvas

STREAMS = (26, 36, 46, 56)
# Centres of the columns.
WINDOW, ENTRIES, QUERY, INDEX_QUERY, WEIGHTS, INDEX_KEY = 155, 328, 498, 646, 722, 864


def draw() -> Canvas:
    canvas = Canvas(
        960,
        1042,
        "A DeepSeek-V4 layer, sizes of Flash",
        "Four residual streams are collapsed into one before attention and before the experts, and "
        "expanded after each. Attention covers a window of 128 tokens and compressed entries of "
        "earlier tokens, which an indexer selects in layers of ratio 4.",
    )
    canvas.legend(490, 32, {"grey": "product", "green": "norm", "blue": "op", "orange": "paged cache"})
    canvas.box(14, 54, 196, 32, "streams X [T, 4, 4096]", kind="plain")
    for x in STREAMS:
        canvas.line((x, 86), (x, 792))
        canvas.line((x, 824), (x, 944))
        canvas.arrow((x, 976), (x, 1020))
    canvas.text(72, 1012, "to the next layer", "muted", "start")
    _collapse(canvas)
    _window(canvas)
    _compressor(canvas)
    _query(canvas)
    _indexer(canvas)
    _attention(canvas)
    _output(canvas)
    _experts(canvas)
    return canvas


def _read_streams(canvas: Canvas, y: float) -> None:
    """All four streams enter the box whose left side is at the arrow's head."""
    canvas.rect(STREAMS[0] - 6, y - 5, STREAMS[-1] - STREAMS[0] + 12, 10, "plain", radius=3)
    canvas.arrow((STREAMS[-1] + 6, y), (88, y))


def _collapse(canvas: Canvas) -> None:
    _read_streams(canvas, 124)
    canvas.box(88, 108, 852, 32, "`hyper_collapse`: x = Σ_k pre_k · X_k; pre, post and comb come from all four streams")
    canvas.box(88, 164, 852, 32, "`attn_norm`: x [T, 4096]", kind="green")
    canvas.arrow((514, 140), (514, 164))


def _window(canvas: Canvas) -> None:
    canvas.text(WINDOW + 8, 223, "all layers", "muted", "start")
    canvas.box(88, 240, 134, 48, "`wkv`", "512", kind="grey")
    canvas.box(88, 324, 134, 48, "`write_mla_cache`", "RMSNorm, rope")
    canvas.box(88, 426, 134, 66, "window cache", "a ring of", "128 + 3 tokens", kind="orange")
    canvas.arrow((WINDOW, 196), (WINDOW, 240))
    canvas.arrow((WINDOW, 288), (WINDOW, 324))
    canvas.arrow((WINDOW, 372), (WINDOW, 426))


def _compressor(canvas: Canvas) -> None:
    canvas.text(ENTRIES + 8, 223, "ratio 4 or 128", "muted", "start")
    canvas.box(242, 240, 172, 48, "compressor: KV, Z", "1024 or 512 each", kind="grey")
    canvas.box(242, 324, 172, 66, "`write_compressed_kv`", "gated sum of tokens,", "RMSNorm, rope")
    canvas.box(242, 426, 172, 66, "entry cache", "one entry per", "4 or 128 tokens", kind="orange")
    canvas.arrow((ENTRIES, 196), (ENTRIES, 240))
    canvas.arrow((ENTRIES, 288), (ENTRIES, 324))
    canvas.arrow((ENTRIES, 390), (ENTRIES, 426))


def _query(canvas: Canvas) -> None:
    canvas.text(QUERY + 8, 223, "all layers", "muted", "start")
    canvas.box(434, 240, 128, 48, "`wq_a`", "1024", kind="grey")
    canvas.box(434, 324, 128, 48, "`q_norm`", "qr [T, 1024]", kind="green")
    canvas.box(434, 408, 128, 48, "`wq_b`", "64 × 512", kind="grey")
    canvas.box(434, 492, 128, 48, "RMSNorm per", "head, rope", kind="green")
    for start, end in ((196, 240), (288, 324), (372, 408), (456, 492)):
        canvas.arrow((QUERY, start), (QUERY, end))


def _indexer(canvas: Canvas) -> None:
    canvas.rect(590, 212, 358, 460, "plain", dashed=True)
    canvas.lines(602, 232, ["indexer,", "ratio 4"], "muted")
    canvas.box(664, 240, 116, 48, "`weights_proj`", "64, fp32", kind="grey")
    canvas.box(602, 324, 88, 48, "`wq_b`", "64 × 128", kind="grey")
    canvas.box(602, 410, 164, 48, "rope, Hadamard, FP8;", "scale of q into w")
    canvas.arrow((WEIGHTS, 196), (WEIGHTS, 240))
    canvas.arrow((562, 348), (602, 348))
    canvas.arrow((INDEX_QUERY, 372), (INDEX_QUERY, 410))
    canvas.arrow((WEIGHTS, 288), (WEIGHTS, 410))

    canvas.box(790, 240, 148, 48, "compressor: KV, Z", "256 each", kind="grey")
    canvas.box(772, 324, 166, 66, "`write_compressed_kv`", "RMSNorm, rope,", "Hadamard, FP8")
    canvas.box(784, 426, 154, 48, "index-entry cache", "132 bytes per entry", kind="orange")
    for start, end in ((196, 240), (288, 324), (390, 426)):
        canvas.arrow((INDEX_KEY, start), (INDEX_KEY, end))

    canvas.box(602, 512, 336, 48, "`fp8_mqa_logits`, `fp8_paged_mqa_logits`", "scores of entries s < ⌊(t + 1) / 4⌋")
    for centre, start in ((INDEX_QUERY, 458), (WEIGHTS, 458), (INDEX_KEY, 474)):
        canvas.arrow((centre, start), (centre, 512))
    canvas.box(602, 602, 336, 48, "`topk_indices`", "the 512 largest; all if there are fewer")
    canvas.arrow((770, 560), (770, 602))


def _attention(canvas: Canvas) -> None:
    lines = [
        "o_h = Σ_j exp(z_j) k_j / (Σ_j exp(z_j) + exp(sink_h))",
        "z_j = q_h · k_j / √512; a key is also its value",
        "prefill: `window_sparse_attention`",
        "decode: `flash_mla_with_kvcache` with two caches",
    ]
    canvas.box(88, 584, 474, 84, *lines)
    canvas.arrow((WINDOW, 492), (WINDOW, 584))
    canvas.lines(WINDOW + 8, 538, ["read the", "last 128"], "muted")
    canvas.arrow((ENTRIES, 492), (ENTRIES, 584))
    canvas.lines(ENTRIES + 8, 556, ["read selected;", "ratio 128: all"], "muted")
    canvas.arrow((QUERY, 540), (QUERY, 584))
    canvas.arrow((602, 626), (562, 626))


def _output(canvas: Canvas) -> None:
    canvas.box(88, 708, 196, 48, "inverse rope of o,", "by the angle of query t")
    canvas.box(330, 708, 290, 48, "`wo_a`: 8 groups of 8 heads,", "each 4096 → 1024", kind="grey")
    canvas.box(666, 708, 274, 48, "`wo_b`", "8192 → 4096: y", kind="grey")
    canvas.arrow((186, 668), (186, 708))
    canvas.arrow((284, 732), (330, 732))
    canvas.arrow((620, 732), (666, 732))
    _expand(canvas, 792)
    canvas.arrow((803, 756), (803, 792))


def _expand(canvas: Canvas, y: float) -> None:
    canvas.box(14, y, 926, 32, "`hyper_expand`: X'_k = post_k · y + Σ_j comb[j, k] · X_j")


def _experts(canvas: Canvas) -> None:
    _read_streams(canvas, 884)
    canvas.box(88, 860, 196, 48, "`hyper_collapse`", "with its own weights")
    canvas.box(330, 860, 120, 48, "`ffn_norm`", kind="green")
    experts = ("MoE: 6 of 256 routed experts + 1 shared", "layers 0 to 2: experts by token id")
    canvas.box(496, 860, 444, 48, *experts, kind="grey")
    canvas.arrow((284, 884), (330, 884))
    canvas.arrow((450, 884), (496, 884))
    _expand(canvas, 944)
    canvas.arrow((718, 908), (718, 944))
