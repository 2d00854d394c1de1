"""Sparse and dense attention on the small model that comes with dsa, and a picture of the keys that its indexers pick.

usage: python examples/what_the_indexer_picks.py [PICTURE]        (with the extra `plot`; default: picked.png)
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from dsa_layers import SHIPPED_MODEL, SequenceBatch, Tokenizer, load_model
from dsa_layers.evaluation import all_keys, latest_keys

LENGTH = 1024


def main(picture: Path) -> None:
    import matplotlib.pyplot  # noqa: F401  # where it is missing, say so before anything is computed

    model, tokenizer = load_model(SHIPPED_MODEL, dequantize=True, progress=False), Tokenizer(SHIPPED_MODEL)
    device = next(model.parameters()).device
    text = (SHIPPED_MODEL / "held_out.txt").read_text(encoding="utf-8")  # the model was not trained on it
    tokens = torch.tensor(tokenizer.encode(text)[: LENGTH + 1], device=device)
    batch = SequenceBatch.without_cache([LENGTH], device)

    def loss() -> float:
        with torch.no_grad():
            logits = model(tokens[:-1], batch, all_tokens=True)
        return cross_entropy(logits.float(), tokens[1:]).item()

    picked = record_selections(model)
    print(f"the {model.config.index_topk} keys that the indexers pick: {loss():.4f} nats per token")
    selected = {layer: indices.clone() for layer, indices in picked.items()}
    with latest_keys(model):
        print(f"the {model.config.index_topk} latest keys:                 {loss():.4f}")
    with all_keys(model, LENGTH):
        print(f"all keys:                            {loss():.4f}")
    draw(selected, picture)
    print(f"{picture}: a row per token, a dot per selected key")


def record_selections(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """A dict that each pass fills with every layer's selected keys, int32 [tokens, top_k]: positions, then -1."""
    picked: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):

        def record(attention, arguments, results, number=number):
            _, selected = results
            if selected.topk_indices is not None:  # else the layer attended to all keys
                picked[number] = selected.indices("positions", selected.batch)

        layer.self_attn.register_forward_hook(record)
    return picked


def draw(selected: dict[int, torch.Tensor], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(selected), figsize=(6 * len(selected), 6), squeeze=False)
    for (layer, indices), axis in zip(selected.items(), axes[0], strict=True):
        rows, columns = (indices >= 0).nonzero(as_tuple=True)
        axis.scatter(indices[rows, columns].cpu(), rows.cpu(), s=0.1, color="#1f6f8b")
        axis.set(title=f"layer {layer}", xlabel="selected key", ylabel="token", xlim=(0, LENGTH), ylim=(LENGTH, 0))
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", nargs="?", type=Path, default=Path("picked.png"), metavar="PICTURE")
    chosen = parser.parse_args().picture
    if chosen.is_dir() or not chosen.parent.is_dir():
        parser.error(f"PICTURE: must be a file in an existing directory, got {chosen}")
    main(chosen)
