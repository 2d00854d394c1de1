"""The committed SVG pictures of the documents are what docs/pictures/draw.py draws."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


def test_committed_pictures_are_what_the_source_draws(tmp_path):
    subprocess.run([sys.executable, PICTURES / "draw.py", tmp_path], check=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    for svg in drawn.values():
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
