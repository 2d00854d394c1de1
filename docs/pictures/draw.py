"""Write every picture of this folder: python docs/pictures/draw.py [FOLDER]."""

import sys
from pathlib import Path

import cache_bytes
import mla_forms
import sparse_prefill_warps
import v4_keys
import v4_layer
import v32_layer

PICTURES = (mla_forms, v32_layer, v4_layer, v4_keys, sparse_prefill_warps, cache_bytes)


def main(folder: Path) -> None:
    for picture in PICTURES:
        (folder / f"{picture.__name__}.svg").write_text(picture.draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
