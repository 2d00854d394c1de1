"""The environment variables that turn the plugins on, and the log lines that say what stays off.

DSA_ENGINE=1 turns a plugin on. DSA_ENGINE_OPS, names separated by commas, limits it to these parts of a model, for
example to find the part that causes a difference.
"""

import logging
import os

PARTS = {
    "vllm": frozenset(
        {"scores", "topk", "select", "attention", "prefill", "queries", "routing", "experts", "linear"},
    ),
    "sglang": frozenset({"scores", "topk", "attention", "experts", "linear"}),
}
_logger = logging.getLogger("dsa")


def enabled_ops(engine: str) -> frozenset[str]:
    """Return the parts that the environment turns on: none unless DSA_ENGINE is "1", else those in DSA_ENGINE_OPS, or
    all of the engine's if that is unset.

    Raises ValueError for an unknown name in DSA_ENGINE_OPS.
    """
    if os.environ.get("DSA_ENGINE") != "1":
        return frozenset()
    names = {name.strip() for name in os.environ.get("DSA_ENGINE_OPS", "").split(",")} - {""}
    if unknown := sorted(names - PARTS[engine]):
        accepted = ", ".join(sorted(PARTS[engine]))
        raise ValueError(f"DSA_ENGINE_OPS: got {', '.join(unknown)}; accepted for {engine} are {accepted}")
    return frozenset(names) or PARTS[engine]


def declined(engine: str, reason: str) -> None:
    """Log, in one line, that the engine runs without the plugin."""
    _logger.warning("dsa: %s: %s; the engine's own kernels stay", engine, " ".join(reason.split()))


def is_tested(installed: str, tested: tuple[str, ...]) -> bool:
    """Return whether the plugin was tested with the installed version. The build does not matter ("0.33.0+cu130")."""
    return installed.partition("+")[0] in tested
