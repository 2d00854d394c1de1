"""A canvas that writes boxes, labels and arrows as one SVG file, readable in light and dark."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

LINE_HEIGHT = 18
# Fill and stroke of each kind of box, in light and in dark.
BOXES = {
    "plain": (("#ffffff", "#818b98"), ("#0d1117", "#7d8590")),
    "grey": (("#f0f2f5", "#818b98"), ("#1c222b", "#7d8590")),
    "blue": (("#ddf4ff", "#0969da"), ("#0f2745", "#4493f8")),
    "green": (("#dafbe1", "#1a7f37"), ("#11301c", "#3fb950")),
    "orange": (("#fff1e5", "#bc4c00"), ("#38200d", "#db6d28")),
    "purple": (("#fbefff", "#8250df"), ("#2b1d49", "#ab7df8")),
    "yellow": (("#fff8c5", "#9a6700"), ("#332a0c", "#d29922")),
    "strong": (("#e16f24", "#bc4c00"), ("#bd561d", "#db6d28")),
}
# Further colours of lines, which also take the stroke of a kind of box.
INKS = {"ink": ("#1f2328", "#e6edf3"), "muted": ("#59636e", "#9198a1"), "faint": ("#d1d9e0", "#3d444d")}
PAGE = ("#ffffff", "#0d1117")
SANS = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'

Point = tuple[float, float]


def _colours(dark: bool) -> str:
    rules = [f".page{{fill:{PAGE[dark]}}}"]
    for name, modes in BOXES.items():
        fill, stroke = modes[dark]
        rules.append(f".{name}{{fill:{fill};stroke:{stroke}}}.line-{name}{{stroke:{stroke}}}")
        rules.append(f".head-{name}{{fill:{stroke}}}")
    for name, modes in INKS.items():
        rules.append(f".line-{name}{{stroke:{modes[dark]}}}.head-{name}{{fill:{modes[dark]}}}")
    rules.append(f"text{{fill:{INKS['ink'][dark]}}}text.muted{{fill:{INKS['muted'][dark]}}}")
    return "\n".join(rules)


STYLE = f"""text{{font:14px {SANS}}}
text.bold{{font-weight:600}}
text.title{{font-size:18px;font-weight:600}}
tspan.code{{font-family:{MONO};font-size:13.7px}}
.line{{fill:none;stroke-width:1.5}}
.dashed{{stroke-dasharray:5 4}}
{_colours(dark=False)}
@media (prefers-color-scheme: dark){{
{_colours(dark=True)}
}}"""


class Canvas:
    """`width` by `height` units; y grows downwards. `description` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.elements: list[str] = []
        self.text(20, 32, title, "title", "start")

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        """One line with its baseline at y, words in backquotes as code. style: "bold", "muted", "title"."""
        style = f' class="{style}"' if style else ""
        parts = escape(words).split("`")
        parts[1::2] = [f'<tspan class="code">{part}</tspan>' for part in parts[1::2]]
        self.elements.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{"".join(parts)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], style: str = "", anchor: str = "start") -> None:
        """Several lines, the first baseline at y."""
        for i, line in enumerate(lines):
            self.text(x, y + i * LINE_HEIGHT, line, style, anchor)

    def rect(self, x: float, y: float, w: float, h: float, kind: str, *, dashed: bool = False, radius: int = 5) -> None:
        style = f"{kind} dashed" if dashed else kind
        self.elements.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}" class="{style}"/>')

    def box(self, x: float, y: float, w: float, h: float, *lines: str, kind: str = "blue") -> None:
        """A rectangle with centred lines of text."""
        self.rect(x, y, w, h, kind)
        first = y + h / 2 - LINE_HEIGHT * (len(lines) - 1) / 2 + 5
        self.lines(x + w / 2, first, lines, anchor="middle")

    def tag(self, x: float, y: float, word: str) -> None:
        """A character in a circle."""
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="10" class="plain"/>')
        self.text(x, y + 5, word)

    def legend(self, x: float, y: float, kinds: dict[str, str]) -> None:
        """A swatch and a word per kind of box, in a row with its baseline at y."""
        for kind, words in kinds.items():
            self.rect(x, y - 12, 14, 14, kind, radius=3)
            self.text(x + 20, y, words, anchor="start")
            x += 46 + 8.5 * len(words)

    def line(self, *points: Point, colour: str = "muted", dashed: bool = False) -> None:
        style = f"line line-{colour}" + (" dashed" if dashed else "")
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.elements.append(f'<polyline points="{path}" class="{style}"/>')

    def arrow(self, *points: Point, colour: str = "muted", dashed: bool = False) -> None:
        """A line with its head at the last point."""
        (x0, y0), (x, y) = points[-2:]
        length = math.hypot(x - x0, y - y0)
        dx, dy = (x - x0) / length, (y - y0) / length
        neck = (round(x - 9 * dx, 2), round(y - 9 * dy, 2))
        self.line(*points[:-1], neck, colour=colour, dashed=dashed)
        corners = [(x, y), (neck[0] - 4.5 * dy, neck[1] + 4.5 * dx), (neck[0] + 4.5 * dy, neck[1] - 4.5 * dx)]
        path = " ".join(f"{a:g},{b:g}" for a, b in corners)
        self.elements.append(f'<polygon points="{path}" class="head-{colour}"/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-label={quoteattr(self.description)}>',
                f"<title>{escape(self.title)}</title>",
                f"<style>\n{STYLE}\n</style>",
                f'<rect width="{self.width}" height="{self.height}" class="page"/>',
                *self.elements,
                "</svg>\n",
            ]
        )
