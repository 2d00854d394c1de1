"""Environment variables that turn the plugins on, and the log line for a plugin that stays off.

DSA_ENGINE=1 turns the plugins on. DSA_ENGINE_OPS is a comma-separated list of the parts of a model that run on dsa, for
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
    """Return the parts that the environment turns on: none unless DSA_ENGINE is "1", else the parts in DSA_ENGINE_OPS.
    If DSA_ENGINE_OPS is unset or empty, return all parts for the engine.

    Raise ValueError for an unknown name in DSA_ENGINE_OPS.
    """
    if os.environ.get("DSA_ENGINE") != "1":
        return frozenset()
    names = {name.strip() for name in os.environ.get("DSA_ENGINE_OPS", "").split(",")} - {""}
    if unknown := sorted(names - PARTS[engine]):
        accepted = ", ".join(sorted(PARTS[engine]))
        raise ValueError(f"DSA_ENGINE_OPS: got {', '.join(unknown)}; accepted for {engine} are {accepted}")
    return frozenset(names) or PARTS[engine]


def declined(engine: str, reason: str) -> None:
    """Log on one line that the engine runs without the plugin, and why."""
    _logger.warning("dsa: %s: %s; the engine's own kernels stay", engine, " ".join(reason.split()))


def is_tested(installed: str, tested: tuple[str, ...]) -> bool:
    """Return whether the plugin was tested with the installed version. A suffix such as "+cu130" is ignored."""
    return installed.partition("+")[0] in tested
