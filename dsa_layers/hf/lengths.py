"""The tokens of a forward pass of transformers: which rows are tokens, and to which sequences they belong."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.hf.paged_layer import PagedLayer
from dsa_layers.layers.rope import RopeAngles


class TokenLengths:
    """The mask of a pass over [B, S] rows, some of which may be padding. transformers creates this object through its
    AttentionMaskInterface.

    batch_size, q_length  B and S
    attention_mask  bool [B, earlier rows + S]: False for padding, which may be at any position; None if every row is
                    a token
    """

    def __init__(
        self, *, batch_size: int, q_length: int, attention_mask: torch.Tensor | None = None, **rest: Any
    ) -> None:
        if attention_mask is not None and (attention_mask.dim() != 2 or len(attention_mask) != batch_size):
            raise ValueError(
                f"attention_mask: must be [{batch_size}, tokens], 0 for padding, or None, got shape "
                f"{list(attention_mask.shape)}"
            )
        self.batch_size, self.new, self.mask = batch_size, q_length, attention_mask
        self._passes: dict[Any, Pass | None] = {}
        self._counts: list[int] | None = None
        self._separate: bool | None = None

    def __getitem__(self, part: Any) -> torch.Tensor:
        raise ValueError(
            "attn_implementation: 'dsa' is for the layers of dsa_layers.hf, got it for transformers' own; call "
            "dsa_layers.hf.accelerate(model)"
        )

    def packed(
        self, position_ids: torch.Tensor, layer: PagedLayer | None, *, consecutive: bool, separate: bool
    ) -> "Pass | None":
        """Return the packed tokens, or None if there are no tokens. The tokens follow the tokens that `layer` has
        stored. All layers on a device whose caches have equally many pages get the same object.

        position_ids  [B or 1, S] on the layer's device
        layer         the layer's cache, which must have room for the tokens; None if the layer has no cache
        consecutive   whether to require that the positions of a sequence are consecutive
        separate      whether a new sequence begins at each position that is not the previous position + 1, as in
                      transformers without a cache. It has an effect only without a mask. The argument of a pass's first
                      layer applies to all layers, because checkpointing removes the cache from some of them
        """
        if self._separate is None:
            self._separate = separate and self.mask is None
        key = position_ids.device, None if layer is None else layer.pages_each
        if key not in self._passes:
            self._passes[key] = self._pack(position_ids, layer, consecutive)
        return self._passes[key]

    def counts(self, layer: PagedLayer | None) -> list[int]:
        """Return the number of new tokens of each sequence. Raise ValueError if the mask contradicts `layer`. The first
        call computes the result for all layers."""
        if self._counts is not None:
            return self._counts
        held = [0] * self.batch_size if layer is None else layer.lens
        seen = 0 if layer is None else layer.seen
        if self.mask is None:
            if any(n != seen for n in held):
                raise ValueError(
                    "attention_mask: is needed after a pass with padding, got None; after a pass with gradients the "
                    "cache holds no tokens: make the first pass, too, under torch.no_grad()"
                )
            self._counts = [self.new] * self.batch_size
            return self._counts
        if self.mask.shape[1] != seen + self.new:
            raise ValueError(
                f"attention_mask: must have a column for each of {seen} earlier and {self.new} new tokens, got shape "
                f"{list(self.mask.shape)}"
            )
        self._counts, earlier = torch.stack((self.mask[:, seen:].sum(1), self.mask[:, :seen].sum(1))).tolist()
        if earlier != held:
            raise ValueError(
                f"attention_mask: must show the earlier tokens that the cache holds, {held} of each sequence, "
                f"got {earlier}"
            )
        return self._counts

    def _pack(self, position_ids: torch.Tensor, layer: PagedLayer | None, consecutive: bool) -> "Pass | None":
        new, device = self.counts(layer), position_ids.device
        if not any(new):
            return None
        positions, rows = position_ids.expand(self.batch_size, -1).flatten(), None
        if any(n < self.new for n in new):
            rows = self.mask[:, -self.new :].to(device).flatten().nonzero().squeeze(1)
            positions = positions[rows]
        present = [b for b, n in enumerate(new) if n]
        lens = tuple(new[b] for b in present)
        runs = _runs(positions, self.batch_size) if self._separate else lens
        if layer is None:
            batch = SequenceBatch(runs, runs, device)
        elif runs == lens:
            key_lens = tuple(layer.lens[b] + new[b] for b in present)
            table = layer.block_table(present, device)
            batch = SequenceBatch(lens, key_lens, device, table, layer.page_size, tuple(present))
        else:
            raise ValueError(
                "position_ids: must be consecutive where some layers of a pass have a cache and others, such as "
                "checkpointed ones, have none; got others. Several sequences in a row need use_cache=False"
            )
        if consecutive:
            offsets = positions - batch.positions
            if not (offsets == offsets[batch.last_tokens][batch.sequences.long()]).all():
                raise ValueError(
                    "position_ids: must be consecutive within a sequence for models that compress tokens; got others. "
                    "Several sequences in a row need use_cache=False and no attention_mask"
                )
        return Pass(batch, positions, rows, (self.batch_size, self.new))


@dataclass
class Pass:
    """The T packed tokens of a pass over B * S rows.

    batch      the lengths of the sequences
    positions  int64 [T]: the tokens' positions from the caller's position_ids
    rows       int64 [T]: the tokens' indices among the B * S rows; None if all rows are tokens
    shape      (B, S)
    """

    batch: SequenceBatch
    positions: torch.Tensor
    rows: torch.Tensor | None
    shape: tuple[int, int]
    _angles: dict[Any, tuple[Any, RopeAngles]] = field(default_factory=dict)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens' rows [T, D] of x [B, S, D]."""
        x = x.flatten(0, 1)
        return x if self.rows is None else x[self.rows]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, S, D]: the rows of x [T, D] for the tokens, and 0 for padding."""
        if self.rows is not None:
            x = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1]).index_copy(0, self.rows, x)
        return x.unflatten(0, self.shape)

    def angles(self, rope: tuple[torch.Tensor, torch.Tensor], channels: int) -> RopeAngles:
        """Return (cos, sin), fp32 [T, channels / 2], of the packed tokens. All layers with the same `rope` get the same
        tensors.

        rope  transformers' (cos, sin), [B or 1, S, channels or channels / 2]
        """

        def of_tokens() -> RopeAngles:
            parts = [part[..., : channels // 2].expand(self.shape[0], -1, -1) for part in rope]
            # torch.compile cannot trace a tuple that is constructed from a generator, so use a list.
            return RopeAngles([self.pack(part).float().contiguous() for part in parts])

        return self._kept(id(rope[0]), rope, of_tokens)

    def entry_angles(self, rotary: torch.nn.Module, ratio: int, like: torch.Tensor) -> RopeAngles:
        """Return (cos, sin) for the entries that may end at the T tokens. An entry has `ratio` tokens and uses the
        angles of the first one. rotary: transformers' rotary embedding, called with `like` as its input x."""

        def of_entries() -> RopeAngles:
            positions = (self.positions + (1 - ratio)).clamp(min=0)[None]
            cos_sin = rotary(like, position_ids=positions, layer_type="compress")
            return RopeAngles([part[0].float().contiguous() for part in cos_sin])

        return self._kept(("entries", ratio), None, of_entries)

    def _kept(self, key: Any, source: Any, make: Callable[[], RopeAngles]) -> RopeAngles:
        if key not in self._angles:  # keep the source alive, so that no other object gets its id
            self._angles[key] = source, make()
        return self._angles[key][1]


def _runs(positions: torch.Tensor, batch_size: int) -> tuple[int, ...]:
    """Return the lengths of the runs of consecutive positions in each row of the batch."""
    breaks = positions.diff() != 1
    each = len(positions) // batch_size
    breaks[each - 1 :: each] = True
    ends = [*(breaks.nonzero().squeeze(1) + 1).tolist(), len(positions)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends))
