"""Which keys a query of DeepSeek-V4 attends to, and how tokens become compressed entries.

Source: dsa_layers/layers/compressed_attention.py and compressor.py, dsa_layers/batch/views.py,
dsa/reference/cache/compressed_kv.py.
"""

from canvas import Canvas

QUERY, WINDOW = 430, 128
LEFT, SCALE = 30, 900 / (QUERY + 1)  # units per token
ENTRIES, BLOCKS = (QUERY + 1) // 4, (QUERY + 1) // 128  # that the query may see
SELECTED = {37 * i * i % ENTRIES for i in range(24)}


def draw() -> Canvas:
    canvas = Canvas(
        960,
        676,
        f"Keys of query t = {QUERY} in DeepSeek-V4",
        "A query attends to the last 128 tokens. In layers of ratio 4 it also attends to selected "
        "entries, each made of 4 tokens and the 4 before; in layers of ratio 128 to all entries.",
    )
    canvas.legend(618, 32, {"blue": "token", "strong": "entry", "grey": "not read"})
    _tokens(canvas, 88)
    _entries(canvas, 182)
    _blocks(canvas, 298)
    formula = "C_i = Σ_j softmax_j(Z_j) · KV_j in every channel; Z_j = gate_j + ape[j mod ratio]"
    canvas.text(LEFT, 392, "Entry i before its norm and rope", "bold", "start")
    canvas.text(LEFT, 412, formula, anchor="start")
    _overlapping(canvas, 466)
    _one_block(canvas, 466)
    notes = [
        "Keys of both kinds and the sink share one softmax. Flash has 2 layers without a compressor, 21 of ratio 4",
        "and 20 of ratio 128; Pro has 30 of ratio 4 and 31 of ratio 128.",
    ]
    canvas.lines(20, 636, notes, "muted")
    return canvas


def _cell(canvas: Canvas, y: float, first: int, tokens: int, *words: str, kind: str) -> None:
    x, width = LEFT + SCALE * first, SCALE * tokens
    canvas.rect(x, y, width, 32, kind, radius=1)
    for line in words:
        canvas.text(x + width / 2, y + 21, line)


def _tokens(canvas: Canvas, y: float) -> None:
    first = QUERY + 1 - WINDOW
    canvas.text(LEFT, y - 10, "All layers: the last 128 tokens", "bold", "start")
    _cell(canvas, y, 0, first, f"tokens 0 to {first - 1}", kind="grey")
    _cell(canvas, y, first, WINDOW, f"window: {first} to {QUERY}", kind="blue")


def _entries(canvas: Canvas, y: float) -> None:
    canvas.text(LEFT, y - 10, "Layers of ratio 4: the entries that the indexer selects", "bold", "start")
    for i in range(ENTRIES):
        _cell(canvas, y, 4 * i, 4, kind="strong" if i in SELECTED else "grey")
    note = f"{len(SELECTED)} of {ENTRIES} entries are drawn as selected; models select up to 512 (Flash) or 1024 (Pro)."
    canvas.text(LEFT, y + 52, note, "muted", "start")


def _blocks(canvas: Canvas, y: float) -> None:
    canvas.text(LEFT, y - 10, "Layers of ratio 128: all entries of complete blocks", "bold", "start")
    for i in range(BLOCKS):
        _cell(canvas, y, 128 * i, 128, f"entry {i}: tokens {128 * i} to {128 * i + 127}", kind="strong")
    rest = QUERY + 1 - 128 * BLOCKS
    x = LEFT + SCALE * 128 * BLOCKS
    canvas.rect(x, y, SCALE * rest, 32, "plain", dashed=True, radius=1)
    canvas.text(x + SCALE * rest / 2, y + 21, "no entry yet")


CELL = 32  # width and height of a token's channels


def _overlapping(canvas: Canvas, y: float) -> None:
    x = 150
    canvas.text(LEFT, y - 20, "Ratio 4: 8 tokens, block i - 1 and block i", anchor="start")
    for token in range(8):
        for row in range(2):
            kind = "blue" if (token < 4) == (row == 0) else "grey"
            canvas.rect(x + CELL * token, y + CELL * row, CELL, CELL, kind, radius=1)
    canvas.text(LEFT, y + 21, "channels 0–511", "muted", "start")
    canvas.text(LEFT, y + 53, "512–1023", "muted", "start")
    _entry(canvas, x, y + 2 * CELL, 8)


def _one_block(canvas: Canvas, y: float) -> None:
    x = 500
    canvas.text(x, y - 20, "Ratio 128: 128 tokens, block i", anchor="start")
    for token in (*range(6), *range(7, 13)):
        canvas.rect(x + CELL * token, y + CELL / 2, CELL, CELL, "blue", radius=1)
    canvas.text(x + CELL * 6.5, y + CELL + 4, "…")
    _entry(canvas, x, y + 1.5 * CELL, 13)


def _entry(canvas: Canvas, x: float, y: float, cells: int) -> None:
    canvas.arrow((x + CELL * cells / 2, y + 4), (x + CELL * cells / 2, 564))
    canvas.box(x, 564, CELL * cells, 32, "entry i: 512 channels", kind="orange")
