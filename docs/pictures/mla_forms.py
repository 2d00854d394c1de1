"""The multi-head and the absorbed form of MLA, with the sizes of DeepSeek-V3.2.

Source: dsa_layers/layers/attention.py (`DSAAttention`) and attention_form.py.
"""

from canvas import LINE_HEIGHT, Canvas

SCALE = 0.46  # units per channel
BAR = 30
NOPE, ROPE, LATENT = (128, "blue"), (64, "green"), (512, "orange")


def draw() -> Canvas:
    canvas = Canvas(
        960,
        860,
        "Two forms of multi-head latent attention (MLA), sizes of DeepSeek-V3.2",
        "Multi-head form: kv_b_proj expands the cached latent into keys of 192 and values of 128 "
        "channels for each of 128 heads. Absorbed form: W_UK moves the queries into the latent "
        "space, and all heads attend to one key of 576 channels, the cached row itself.",
    )
    for x, name, subtitle in (
        (20, "Multi-head form", "every head has its own keys and values"),
        (490, "Absorbed form", "all heads attend to the cached row itself"),
    ):
        canvas.rect(x, 50, 450, 606, "plain", radius=8)
        canvas.text(x + 20, 76, name, "bold", "start")
        canvas.text(x + 20, 96, subtitle, "muted", "start")
        canvas.lines(x + 20, 126, ["cached row, one per token", "latent c | rope key k_pe"])
        canvas.lines(x + 341, 126, ["query q_h", "128 heads"])
        _bar(canvas, x + 20, 158, LATENT, ROPE)
        _bar(canvas, x + 341, 158, NOPE, ROPE, stacked=True)
    _multi_head(canvas, 20)
    _absorbed(canvas, 490)
    _facts(canvas)
    return canvas


def _bar(canvas: Canvas, x: float, y: float, *parts: tuple[int, str], stacked: bool = False) -> None:
    """The channels of a row; a stack of rows if every head has its own."""
    if stacked:
        width = SCALE * sum(channels for channels, _ in parts)
        for offset in (8, 4):
            canvas.rect(x + offset, y - offset, width, BAR, "plain")
    for channels, kind in parts:
        canvas.box(x, y, SCALE * channels, BAR, str(channels), kind=kind)
        x += SCALE * channels


def _multi_head(canvas: Canvas, x: float) -> None:
    canvas.box(x + 30, 220, 210, 44, "`kv_b_proj`", "W_UV_h c | W_UK_h c", kind="grey")
    _bar(canvas, x + 40, 312, NOPE, stacked=True)
    _bar(canvas, x + 165, 312, NOPE, ROPE, stacked=True)
    canvas.text(x + 116, 332, "v_h", anchor="start")
    canvas.text(x + 270, 332, "k_h", anchor="start")
    canvas.arrow((x + 135, 188), (x + 135, 220))
    canvas.arrow((x + 70, 264), (x + 70, 302))
    canvas.arrow((x + 195, 264), (x + 195, 302))
    canvas.arrow((x + 270, 188), (x + 270, 284), (x + 240, 284), (x + 240, 302))
    canvas.text(x + 280, 240, "shared by", "muted", "start")
    canvas.text(x + 280, 258, "all heads", "muted", "start")

    canvas.box(x + 150, 386, 290, 44, "p = softmax(scale · q_h · k_h)", "192 channels per score")
    canvas.arrow((x + 209, 342), (x + 209, 386))
    canvas.arrow((x + 385, 188), (x + 385, 386))

    canvas.box(x + 20, 468, 420, 44, "o_h = Σ p v_h", "128 channels per head")
    canvas.arrow((x + 70, 342), (x + 70, 468))
    canvas.arrow((x + 295, 430), (x + 295, 468))
    _output(canvas, x, 512)


def _absorbed(canvas: Canvas, x: float) -> None:
    canvas.box(x + 296, 220, 100, 44, "W_UK_hᵀ", "128 → 512", kind="grey")
    _bar(canvas, x + 165, 312, LATENT, ROPE, stacked=True)
    canvas.text(x + 158, 332, "q̃_h", anchor="end")
    canvas.arrow((x + 370, 188), (x + 370, 220))
    canvas.arrow((x + 346, 264), (x + 346, 302))
    canvas.arrow((x + 415, 188), (x + 415, 302))

    canvas.box(x + 90, 386, 350, 44, "p = softmax(scale · q̃_h · row)", "576 channels per score")
    canvas.arrow((x + 297, 342), (x + 297, 386))
    canvas.arrow((x + 115, 188), (x + 115, 386))
    canvas.lines(x + 122, 232, ["key: all 576,", "one head"], "muted")

    canvas.box(x + 20, 468, 420, 34, "Σ p c: 512 channels per head")
    canvas.arrow((x + 40, 188), (x + 40, 468))
    canvas.lines(x + 47, 232, ["value:", "first", "512"], "muted")
    canvas.arrow((x + 265, 430), (x + 265, 468))
    canvas.box(x + 20, 532, 420, 34, "o_h = W_UV_h Σ p c: 512 → 128 per head", kind="grey")
    canvas.arrow((x + 230, 502), (x + 230, 532))
    _output(canvas, x, 566)


def _output(canvas: Canvas, x: float, y: float) -> None:
    canvas.box(x + 20, 604, 420, 34, "`o_proj`: 128 heads × 128 → 7168", kind="grey")
    canvas.arrow((x + 230, y), (x + 230, 604))


def _facts(canvas: Canvas) -> None:
    multi_head = [
        ("Multiply-adds per query, key and head", ["192 + 128 = 320"]),
        (
            "Used in",
            [
                "dense prefill; sparse prefill of short contexts,",
                "with one bit per query and key: selected or not",
            ],
        ),
        ("Op", ["`mha_varlen_fwd`"]),
    ]
    absorbed = [
        ("Multiply-adds per query, key and head", ["576 + 512 = 1088"]),
        (
            "Used in",
            [
                "sparse prefill of long contexts, which gathers the",
                "selected rows; decode, dense and sparse",
            ],
        ),
        ("Ops", ["`flash_mla_sparse_fwd`, `flash_mla_with_kvcache`"]),
    ]
    for x, facts in ((40, multi_head), (510, absorbed)):
        y = 686
        for heading, lines in facts:
            canvas.text(x, y, heading, "bold", "start")
            canvas.lines(x, y + LINE_HEIGHT, lines)
            y += LINE_HEIGHT * (1 + len(lines)) + 4
    agreement = "The two forms agree up to rounding."
    choice = "`attention_form.py` chooses the form of a sparse prefill by its lengths."
    canvas.text(20, 840, f"{agreement} {choice}", "muted", "start")
