"""Rows of models on several GPUs as printed lines."""

from dsa_bench.e2e.parallel_rows import Row


def head() -> str:
    columns = f"{'ms':>10}{'tokens/s':>11}{'GB a GPU':>10}{'collectives':>13}{'efficiency':>12}{'speed-up':>10}"
    return f"{'model':<9} {'layers':>8} {'run':<18}{columns}"


def line(row: Row) -> str:
    layers = f"{row['layers']} of {row['published_layers']}"
    text = f"{row['model']:<9} {layers:>8} {row['run']:<18}{row['ms']:10.2f}{row['tokens/s']:11.0f}"
    text += f"{row['memory'] / 1e9:10.1f}"
    if row["efficiency"] is None:
        return text
    text += f"{row['collectives']:13.1%}{row['efficiency']:12.2f}{row['speedup']:10.2f}"
    return text
