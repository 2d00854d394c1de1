"""The byte layouts of the FP8 caches.

Source: dsa/reference/cache/kv_cache.py and indexer_cache.py, dsa/kernels/cache/kv_row.py, dsa/cute/indexer_page.py;
page sizes: dsa_layers/cache/kv_cache.py, compressed_kv_cache.py, dsa_layers/models/deepseek_v4.py.
"""

from typing import NamedTuple

from canvas import Canvas

LEFT, STRIP, BAR = 30, 34, 40  # where strips begin; heights of a page's strip and of a token's bytes
E4M3, SCALE, BF16, PAD, ROW = "blue", "orange", "green", "grey", "plain"


class Part(NamedTuple):
    """Some bytes as a box; offset: where they begin."""

    width: float
    words: str
    kind: str
    offset: str = ""


def draw() -> Canvas:
    canvas = Canvas(
        960,
        824,
        "Bytes of the FP8 caches",
        "V3.2: 656 bytes per token, 512 e4m3, 4 fp32 scales and 64 bf16. V4: rows of 576 bytes, 448 "
        "e4m3 and 64 bf16, then 8 bytes of scales per row at the end of the page. Index keys: 128 "
        "e4m3 per token, then one fp32 scale per token at the end of the page.",
    )
    canvas.legend(500, 32, {E4M3: "e4m3", SCALE: "scale", BF16: "bf16 (rope)", PAD: "padding"})
    _v32(canvas, 76)
    _v4(canvas, 318)
    _index_keys(canvas, 600)
    return canvas


def _strip(canvas: Canvas, x: float, y: float, height: float, parts: list[Part], end: str = "") -> None:
    """Boxes side by side, with their offsets above; end: the offset after the last box."""
    for part in parts:
        canvas.rect(x, y, part.width, height, part.kind, radius=1)
        canvas.text(x + part.width / 2, y + height / 2 + 5, part.words)
        if part.offset:
            canvas.text(x, y - 7, part.offset, "muted", "start")
        x += part.width
    if end:
        canvas.text(x, y - 7, end, "muted", "end")


def _zoom(canvas: Canvas, top: float, part: tuple[float, float], bottom: float, bar: tuple[float, float]) -> None:
    """From the ends of a page's part to those of its bytes."""
    for start, end in zip(part, bar):
        canvas.line((start, top), (end, bottom), colour="faint")


def _v32(canvas: Canvas, y: float) -> None:
    canvas.text(20, y, "V3.2 latent cache: 656 bytes per token, shape [pages, P, 1, 656]", "bold", "start")
    top = y + 36
    tokens = [Part(150, "token 0", ROW, "0"), Part(150, "token 1", ROW, "656"), Part(60, "…", ROW)]
    _strip(canvas, LEFT, top, STRIP, [*tokens, Part(150, "token P - 1", ROW)], "656 P")
    canvas.text(570, top + 22, "P = 64 by default", "muted", "start")

    scale, bar = 900 / 656, top + STRIP + 52
    _zoom(canvas, top + STRIP, (LEFT, LEFT + 150), bar - 24, (LEFT, LEFT + 900))
    groups = [Part(128 * scale, f"128: group {i}", E4M3, str(128 * i)) for i in range(4)]
    scales = Part(16 * scale, "4", SCALE)
    _strip(canvas, LEFT, bar, BAR, [*groups, scales, Part(128 * scale, "64 bf16", BF16)], "656")
    canvas.text(LEFT + 512 * scale, bar - 7, "512", "muted", "end")
    canvas.text(LEFT + 528 * scale, bar - 7, "528", "muted", "start")
    note = "latent, 512 e4m3; group i has fp32 scale i: value = e4m3 × scale"
    canvas.text(LEFT, bar + BAR + 20, note, "muted", "start")
    canvas.text(LEFT + 520 * scale, bar + BAR + 20, "4 fp32 scales", "muted")
    canvas.text(LEFT + 900, bar + BAR + 20, "rope key", "muted", "end")


def _v4(canvas: Canvas, y: float) -> None:
    canvas.text(20, y, "V4 window and entry cache: 584 bytes per row, shape [pages, P, 1, 584]", "bold", "start")
    top = y + 36
    page = [
        Part(120, "row 0", ROW, "0"),
        Part(120, "row 1", ROW, "576"),
        Part(44, "…", ROW),
        Part(120, "row P - 1", ROW),
        Part(92, "scales 0", SCALE, "576 P"),
        Part(92, "scales 1", SCALE, "576 P + 8"),
        Part(44, "…", SCALE),
        Part(120, "scales P - 1", SCALE),
        Part(148, "padding", PAD, "584 P"),
    ]
    _strip(canvas, LEFT, top, STRIP, page)

    bar = top + STRIP + 52
    _zoom(canvas, top + STRIP, (LEFT, LEFT + 120), bar - 24, (LEFT, LEFT + 630))
    groups = [Part(70, "64", E4M3, str(64 * i)) for i in range(7)]
    _strip(canvas, LEFT, bar, BAR, [*groups, Part(140, "64 bf16", BF16, "448")], "576")
    _zoom(canvas, top + STRIP, (434, 526), bar - 24, (690, 930))
    scales = [Part(28, str(i), SCALE) for i in range(7)]
    _strip(canvas, 690, bar, BAR, [*scales, Part(44, "pad", PAD)], "8")
    canvas.text(690, bar - 7, "0", "muted", "start")
    canvas.text(LEFT, bar + BAR + 20, "448 e4m3: 7 groups of 64", "muted", "start")
    canvas.text(LEFT + 630, bar + BAR + 20, "rope channels", "muted", "end")
    canvas.text(690, bar + BAR + 20, "7 ue8m0 scales, 1 byte 0", "muted", "start")
    sizes = "P = 128 + 3 in a window's ring; 64 entries of ratio 4, or 2 of ratio 128, per page of 256 tokens."
    canvas.text(LEFT, bar + BAR + 46, sizes, "muted", "start")
    canvas.text(
        LEFT,
        bar + BAR + 66,
        "`make_v4_cache` pads a page to a multiple of 576 bytes. The shape only counts bytes.",
        "muted",
        "start",
    )


def _index_keys(canvas: Canvas, y: float) -> None:
    canvas.text(20, y, "Index-key cache of V3.2 and V4: 132 bytes per key, shape [pages, P, 1, 132]", "bold", "start")
    top = y + 36
    page = [
        Part(130, "key 0", E4M3, "0"),
        Part(130, "key 1", E4M3, "128"),
        Part(50, "…", E4M3),
        Part(130, "key P - 1", E4M3),
        Part(120, "scale 0", SCALE, "128 P"),
        Part(120, "scale 1", SCALE, "128 P + 4"),
        Part(50, "…", SCALE),
        Part(170, "scale P - 1", SCALE),
    ]
    _strip(canvas, LEFT, top, STRIP, page, "132 P")
    bar = top + STRIP + 52
    _zoom(canvas, top + STRIP, (LEFT, LEFT + 130), bar - 24, (LEFT, LEFT + 440))
    _strip(canvas, LEFT, bar, BAR, [Part(440, "128 e4m3 after the Hadamard transform", E4M3, "0")], "128")
    _zoom(canvas, top + STRIP, (470, 590), bar - 24, (690, 850))
    _strip(canvas, 690, bar, BAR, [Part(160, "1 fp32 scale", SCALE, "0")], "4")
    canvas.text(LEFT, bar + BAR + 22, "P = 64: tokens in V3.2, entries of ratio 4 in V4.", "muted", "start")
