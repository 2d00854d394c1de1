"""What turns the engines' plugins on, and how they say that they stay off.

DSA_ENGINE=1 turns them on. DSA_ENGINE_OPS, words with commas between them, puts only these parts of a model on dsa's
kernels, so that a difference can be traced to one of them.
"""

import logging
import os

OPS = frozenset({"scores", "topk", "attention", "select", "prefill", "queries", "experts", "linear"})
_logger = logging.getLogger("dsa")


def enabled_ops() -> frozenset[str]:
    """The parts of a model that the environment puts on dsa's kernels: none unless DSA_ENGINE is "1", else those that
    DSA_ENGINE_OPS names, or without it all of them.

    Raises ValueError for a word in DSA_ENGINE_OPS that is no such part.
    """
    if os.environ.get("DSA_ENGINE") != "1":
        return frozenset()
    words = {word.strip() for word in os.environ.get("DSA_ENGINE_OPS", "").split(",")} - {""}
    if unknown := sorted(words - OPS):
        raise ValueError(f"DSA_ENGINE_OPS: got {', '.join(unknown)}; accepted are {', '.join(sorted(OPS))}")
    return frozenset(words) or OPS


def declined(engine: str, reason: str) -> None:
    """Says, in one line, that an engine stays as it is."""
    _logger.warning("dsa: %s: %s; the engine's own kernels stay", engine, " ".join(reason.split()))


def tested_version(engine: str, installed: str, tested: tuple[str, ...]) -> bool:
    """Whether the plugin was tested with the installed version, whatever build of it that is ("0.33.0+cu130"). Of
    another one `declined` says which were."""
    if installed.partition("+")[0] in tested:
        return True
    declined(engine, f"version {installed} is installed, and the plugin was tested with {', '.join(tested)}")
    return False
