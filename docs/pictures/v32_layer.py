"""The data flow of a DeepSeek-V3.2 layer with sparse attention.

Source: dsa_layers/models/deepseek_v32.py, attention.py (`DSAAttention`), indexer.py, moe.py.
"""

from canvas import Canvas

KV, QUERY, INDEX_QUERY, WEIGHTS, INDEX_KEY = 136, 350, 563, 706, 857  # centres of the columns


def draw() -> Canvas:
    canvas = Canvas(
        960,
        912,
        "A DeepSeek-V3.2 layer, sparse attention",
        "The normed hidden state feeds the key latents, the query latents and the indexer. The "
        "indexer scores all cached index keys and selects 2048 of them. Sparse MLA attends to the "
        "selected rows of the latent cache. The experts follow.",
    )
    canvas.legend(490, 32, {"grey": "product", "green": "norm", "blue": "op", "orange": "paged cache"})
    _inputs(canvas)
    _indexer(canvas)
    _attention(canvas)
    _experts(canvas)
    _notes(canvas)
    return canvas


def _inputs(canvas: Canvas) -> None:
    """From the hidden state to the latent cache and the absorbed queries."""
    canvas.box(50, 54, 172, 32, "hidden [T, 7168]", kind="plain")
    canvas.box(50, 108, 890, 32, "`input_layernorm`: x [T, 7168]", kind="green")
    canvas.arrow((KV, 86), (KV, 108))
    for centre in (KV, QUERY, WEIGHTS, INDEX_KEY):
        canvas.arrow((centre, 140), (centre, 172))

    canvas.box(50, 172, 172, 48, "`kv_a_proj_with_mqa`", "512 latent | 64 rope", kind="grey")
    canvas.box(50, 256, 172, 48, "`write_mla_cache`", "RMSNorm, rope")
    canvas.box(50, 370, 172, 66, "latent cache", "576 bf16", "or 656 bytes", kind="orange")
    canvas.arrow((KV, 220), (KV, 256))
    canvas.arrow((KV, 304), (KV, 370))
    canvas.text(KV + 8, 342, "write", "muted", "start")

    canvas.box(266, 172, 168, 48, "`q_a_proj`", "1536", kind="grey")
    canvas.box(266, 256, 168, 48, "`q_a_layernorm`", "qr [T, 1536]", kind="green")
    canvas.box(266, 340, 168, 48, "`q_b_proj`", "128 × (128 | 64)", kind="grey")
    canvas.box(266, 424, 168, 48, "W_UK_hᵀ, rope", "128 × (512 | 64)", kind="grey")
    for y in (220, 304, 388):
        canvas.arrow((QUERY, y), (QUERY, y + 36))


def _indexer(canvas: Canvas) -> None:
    canvas.box(494, 256, 138, 48, "`indexer.wq_b`", "64 × 128", kind="grey")
    canvas.arrow((434, 280), (494, 280))
    canvas.box(647, 172, 118, 48, "`weights_proj`", "64, fp32", kind="grey")
    canvas.box(776, 172, 164, 48, "`indexer.wk`", "128", kind="grey")

    canvas.box(494, 340, 271, 66, "`quantize_indexer_queries`", "rope, Hadamard, FP8;", "the scale of q goes into w")
    canvas.arrow((INDEX_QUERY, 304), (INDEX_QUERY, 340))
    canvas.arrow((WEIGHTS, 220), (WEIGHTS, 340))
    canvas.text(WEIGHTS + 8, 262, "w", "muted", "start")
    canvas.text(INDEX_QUERY + 8, 326, "q", "muted", "start")

    canvas.box(776, 256, 164, 66, "`write_indexer_keys`", "LayerNorm, rope,", "Hadamard, FP8")
    canvas.box(776, 370, 164, 48, "index-key cache", "132 bytes per token", kind="orange")
    canvas.arrow((INDEX_KEY, 220), (INDEX_KEY, 256))
    canvas.arrow((INDEX_KEY, 322), (INDEX_KEY, 370))
    canvas.text(INDEX_KEY + 8, 351, "write", "muted", "start")

    scores = "I[t, s] = k_scale[s] · Σ_h w[t, h] · relu(q[t, h] · k[s])"
    canvas.box(494, 454, 446, 48, "`fp8_mqa_logits, fp8_paged_mqa_logits`", scores)
    for centre, start in ((INDEX_QUERY, 406), (WEIGHTS, 406), (INDEX_KEY, 418)):
        canvas.arrow((centre, start), (centre, 454))
    canvas.text(INDEX_QUERY + 8, 434, "q in e4m3", "muted", "start")
    canvas.text(WEIGHTS + 8, 434, "w", "muted", "start")
    canvas.text(INDEX_KEY + 8, 440, "read all", "muted", "start")

    canvas.box(494, 546, 446, 48, "`topk_indices`", "the 2048 largest I[t, s] with s ≤ t: int32 [T, 2048]")
    canvas.arrow((717, 502), (717, 546))
    canvas.text(725, 528, "fp32 scores", "muted", "start")


def _attention(canvas: Canvas) -> None:
    kernels = ("prefill: `flash_mla_sparse_fwd`", "decode: `flash_mla_with_kvcache`")
    canvas.box(50, 546, 384, 66, "sparse MLA, absorbed form: 128 × 512", *kernels)
    canvas.arrow((KV, 436), (KV, 546))
    canvas.text(KV + 8, 494, "read the selected", "muted", "start")
    canvas.text(KV + 8, 512, "rows", "muted", "start")
    canvas.arrow((QUERY, 472), (QUERY, 546))
    canvas.arrow((494, 570), (434, 570))
    canvas.box(50, 648, 384, 34, "W_UV_h: 128 heads × (512 → 128)", kind="grey")
    canvas.box(50, 718, 384, 34, "`o_proj`: 16384 → 7168", kind="grey")
    canvas.arrow((242, 612), (242, 648))
    canvas.arrow((242, 682), (242, 718))


def _experts(canvas: Canvas) -> None:
    canvas.box(228, 784, 28, 28, "+", kind="plain")
    canvas.arrow((242, 752), (242, 784))
    canvas.arrow((50, 70), (28, 70), (28, 798), (228, 798))
    canvas.box(50, 848, 384, 34, "`post_attention_layernorm`", kind="green")
    canvas.arrow((242, 812), (242, 848))
    experts = ("MoE: 8 of 256 routed experts + 1 shared", "layers 0 to 2: dense SwiGLU")
    canvas.box(494, 838, 330, 54, *experts, kind="grey")
    canvas.arrow((434, 865), (494, 865))
    canvas.box(862, 851, 28, 28, "+", kind="plain")
    canvas.arrow((824, 865), (862, 865))
    canvas.arrow((256, 798), (876, 798), (876, 851))
    canvas.arrow((890, 865), (940, 865))


def _notes(canvas: Canvas) -> None:
    notes = [
        "Rope of the indexer: first 64 of 128 channels, pairs (i, i + 32).",
        "Rope of MLA: the 64 rope channels, pairs (2i, 2i + 1).",
        "With at most 2048 keys per sequence, attention covers all",
        "keys, and the indexer only writes its own. Decode from FP8",
        "pages always selects. Prefill from FP8 pages first reads all",
        "keys as bf16 if these take at most 192 MiB. Sparse prefill of",
        "short contexts takes the multi-head form.",
    ]
    canvas.lines(494, 640, notes, "muted")
