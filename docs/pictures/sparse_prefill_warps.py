"""The warpgroups of the sparse MLA prefill kernel over time, and the barriers between them.

Source: dsa/kernels/mla/sparse_mla_sm90.py, sparse_mla_kernel.py, mla_attention.py, mla_softmax.py, mla_tiles.py,
topk_gather.py. The schedule follows from the barriers; the lengths are not measured.
"""

from canvas import LINE_HEIGHT, Canvas

LEFT, END = 176, 764  # where time 0 is; how much time is drawn
TILE = 420  # from a tile's first score to the next tile's
SCORED, HALF = 250, 345  # within a tile: its scores are done; the first half of its P is done
# How long work takes: the first v chunk with half 0 and with half 1 of P, the second v chunk, a gather, its latency.
V_HALF_0, V_HALF_1, SECOND_V, GATHER, IN_FLIGHT = 44, 55, 75, 90, 140
LOAD, SCORE, OUTPUT_0, OUTPUT_1, TENSOR = 104, 194, 284, 346, 412  # tops of the lanes
HEIGHT = 44
COLOURS = ("grey", "blue", "green", "orange", "purple")  # of tiles n - 1 to n + 3


def draw() -> Canvas:
    canvas = Canvas(
        960,
        1014,
        "Sparse MLA prefill: the warpgroups of a CTA over time",
        "The load warpgroup gathers keys up to two and a half tiles ahead. While the score "
        "warpgroup computes the softmax of a tile, the output warpgroups use the tensor cores for "
        "the second half of the tile before it.",
    )
    words = ("tile n - 1", "tile n", "tile n + 1", "tile n + 2", "tile n + 3")
    canvas.legend(LEFT, 66, dict(zip(COLOURS, words)))
    canvas.text(940, 66, "schematic", "muted", "end")
    _lane_names(canvas)
    _arrows(canvas)
    for tile in range(-1, 4):
        _tile(canvas, tile)
    _tensor_cores(canvas)
    _barriers(canvas)
    return canvas


def _lane_names(canvas: Canvas) -> None:
    for y, name, warps in (
        (LOAD, "Load", "warps 12 to 15"),
        (SCORE, "Score", "warps 0 to 3"),
        (OUTPUT_0, "Output 0", "warps 4 to 7"),
        (OUTPUT_1, "Output 1", "warps 8 to 11"),
    ):
        canvas.text(20, y + 18, name, "bold", "start")
        canvas.text(20, y + 18 + LINE_HEIGHT, warps, "muted", "start")
    canvas.text(20, TENSOR + 18, "Tensor cores", "bold", "start")


def _work(canvas: Canvas, lane: float, tile: int, begin: float, length: float, *words: str) -> None:
    """Work on a tile from `begin` on, counted from the tile's first score; cut where the drawn time begins or ends."""
    begin += TILE * tile
    begin, end = max(begin, 0), min(begin + length, END)
    if begin < end:
        words = words if end - begin > 30 else ()
        canvas.box(LEFT + begin, lane, end - begin, HEIGHT, *words, kind=COLOURS[tile + 1])


def _tile(canvas: Canvas, tile: int) -> None:
    _work(canvas, LOAD, tile, SCORED + SECOND_V - 2 * TILE, GATHER, "v 0, v 2")
    _work(canvas, LOAD, tile, -TILE, V_HALF_1, "rope")
    _work(canvas, LOAD, tile, V_HALF_1 - TILE, GATHER, "v 1, v 3")
    if tile in (1, 2):
        x = LEFT + TILE * (tile - 1) + V_HALF_1 + GATHER
        canvas.rect(x, LOAD, IN_FLIGHT, HEIGHT, "plain", dashed=True)
        canvas.text(x + 62, LOAD + 27, "in flight", "muted")
        canvas.tag(x + IN_FLIGHT - 20, LOAD + HEIGHT / 2, "1")
    _work(canvas, SCORE, tile, 0, SCORED, "S = Q Kᵀ", "576 channels")
    if tile in (0, 1):
        canvas.tag(LEFT + TILE * tile + 18, SCORE + HEIGHT / 2, "1")
    _work(canvas, SCORE, tile, SCORED, HALF - SCORED, "softmax,", "P half 0")
    _work(canvas, SCORE, tile, HALF, TILE - HALF, "P half 1")
    for side, lane in ((0, OUTPUT_0), (1, OUTPUT_1)):
        first, second = f"v {2 * side}", f"v {2 * side + 1}"
        _work(canvas, lane, tile, HALF, V_HALF_0, first, "0–31")
        _work(canvas, lane, tile, TILE, V_HALF_1, first, "32–63")
        _work(canvas, lane, tile, TILE + SCORED, SECOND_V, second, "0–63")


def _arrows(canvas: Canvas) -> None:
    """Where one warpgroup waits for another at that moment."""
    for begin in (0, TILE):
        for time, tag in ((SCORED, "2"), (HALF, "3"), (TILE, "4")):
            x = LEFT + begin + time
            if x < LEFT + END - 20:
                canvas.arrow((x, SCORE + HEIGHT), (x, OUTPUT_0))
                canvas.tag(x, (SCORE + HEIGHT + OUTPUT_0) / 2 - 4, tag)
        for time in (V_HALF_1, SCORED + SECOND_V):
            x = LEFT + begin + time
            canvas.arrow((x, OUTPUT_0), (x, LOAD + HEIGHT), dashed=True)
            canvas.tag(x, (LOAD + HEIGHT + SCORE) / 2 + 3, "5")
    x = LEFT + TILE
    canvas.arrow((x, SCORE), (x, LOAD + HEIGHT))
    canvas.tag(x, (LOAD + HEIGHT + SCORE) / 2 + 3, "6")


def _tensor_cores(canvas: Canvas) -> None:
    for begin, end in ((0, SCORED + SECOND_V), (HALF, HALF + V_HALF_0), (TILE, TILE + SCORED + SECOND_V)):
        canvas.rect(LEFT + begin, TENSOR, end - begin, 26, "yellow")


def _barriers(canvas: Canvas) -> None:
    rows = [
        (
            "1",
            "v full",
            "10 × 2",
            "128 load threads: copies landed",
            "score: a chunk of 64 keys × 64 channels is there",
        ),
        ("1", "rope full", "2", "128 load threads, 4 load warps", "score: rope part and valid mask are there"),
        ("2", "scored", "1", "4 score warps", "output: S of the next tile is done"),
        ("3", "P full, half 0", "2", "4 score warps", "output: rescale factors and P of keys 0 to 31"),
        ("4", "P full, half 1", "2", "4 score warps", "output: P of keys 32 to 63"),
        ("5", "v empty", "10", "4 warps of one output warpgroup", "load: the stage is free"),
        ("6", "rope empty", "2", "4 score warps", "load: the stage is free"),
        ("", "P empty", "2", "8 output warps", "score: the stage is free"),
        ("", "end full", "1", "4 score warps", "output: 1 / row sum is there, O can be stored"),
        ("", "end empty", "1", "8 output warps", "score: 1 / row sum of the next query can be written"),
        ("", "work full", "2", "load warp 12", "score, output: query and tiles of the next work tile"),
        ("", "work empty", "2", "12 score and output warps", "load: the stage is free"),
        ("", "named: SCORE", "", "128 score threads", "score: before Q is overwritten, and before it is used"),
        ("", "named: OUTPUT", "", "256 output threads", "output: before O is staged in the memory of P"),
    ]
    chunks = [
        "v 0 to v 3: chunks of 128 channels of a tile of 64 keys. Output 0 computes O += P V for v 0 and v 1 (channels",
        "0 to 255), Output 1 for v 2 and v 3 (256 to 511); 0–31, 32–63 and 0–63 are the keys of a product.",
    ]
    canvas.lines(20, 466, chunks, "muted")
    columns = (30, 50, 172, 236, 500)
    y = 520
    for x, words in zip(columns[1:], ("barrier", "stages", "who arrives", "who waits, and for what")):
        canvas.text(x, y, words, "bold", "start")
    for i, (tag, *words) in enumerate(rows):
        y = 546 + 24 * i
        canvas.line((20, y - 18), (940, y - 18), colour="faint")
        if tag:
            canvas.tag(columns[0], y - 5, tag)
        for x, word in zip(columns[1:], words):
            if word:
                canvas.text(x, y, word, anchor="start")
    notes = [
        "The output warpgroups do not wait for v full: the score warpgroup has waited for all of a tile before P full.",
        "If a tile's last chunk has landed, the score warpgroup tests one barrier in place of the tile's v full.",
        "A query's rows pass through the rings as a tile before its keys. The score warpgroup copies 5 of their 9",
        "chunks of 64 channels to registers and 4 to shared memory, and releases their stages.",
        "Shared memory: v 10 × 16 KiB, rope 2 × 8 KiB, P 2 × 8 KiB, Q 4 × 8 KiB.",
        "Registers per thread: load 40, score 152, output 160.",
    ]
    canvas.lines(20, 904, notes, "muted")
