"""One module per op: `run()` times it beside the peers that can be imported and returns rows for the receipt.

A row is {"shape": str, "ms": float, "figure": str, "peer": str | None, "peer_ms": float | None, "ratio": float | None}
with ratio = peer_ms / ms, so above 1 is faster than the best peer of the same run.
"""
