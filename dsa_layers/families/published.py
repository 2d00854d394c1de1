"""The pinned facts about published checkpoints: JSON in `dsa_layers/vendored`, whose README has their sources.

Benchmarks and tiny checkpoints read them and change a few fields; tests hold the models against them.
"""

import json
from pathlib import Path
from typing import Any

VENDORED = Path(__file__).parents[1] / "vendored"


def published_config(file: str) -> dict[str, Any]:
    """The fields of a pinned config.json, by its name in `dsa_layers/vendored`."""
    return json.loads((VENDORED / file).read_text(encoding="utf-8"))
