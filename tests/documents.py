"""Read the Python examples in README.md and docs/."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python_blocks() -> list[str]:
    texts = (path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))])
    return [block for text in texts for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)]
