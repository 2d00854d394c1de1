"""What a forward pass of transformers' computes: which of its rows are tokens, and of which sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.hf.paged_layer import CACHE, PagedLayer
from dsa_layers.layers.rope import RopeAngles

NOT_OURS = (
    "attn_implementation: 'dsa' is for the layers of dsa_layers.hf, got it for transformers' own; call "
    "dsa_layers.hf.accelerate(model)"
)


def lengths_mask(
    *, batch_size: int, q_length: int, attention_mask: torch.Tensor | None = None, **rest: Any
) -> "TokenLengths":
    """The mask of a pass, as transformers' AttentionMaskInterface asks for it: no tensor of queries and keys."""
    return TokenLengths(batch_size, q_length, attention_mask)


class TokenLengths:
    """The tokens of a pass over [B, S] rows of which some may be padding.

    attention_mask  bool [B, earlier + S], False for padding, wherever it is; None if every row is a token. A sequence
                    is made of its tokens in their order, as if there were no padding
    """

    def __init__(self, batch_size: int, new: int, attention_mask: torch.Tensor | None) -> None:
        if attention_mask is not None and (attention_mask.dim() != 2 or len(attention_mask) != batch_size):
            raise ValueError(
                f"attention_mask: must be [{batch_size}, tokens], 0 for padding, or None, got shape "
                f"{list(attention_mask.shape)}"
            )
        self.batch_size, self.new, self.mask = batch_size, new, attention_mask
        self._passes: dict[Any, Pass | None] = {}
        self._separate: bool | None = None

    def contiguous(self) -> "TokenLengths":
        """`generate` asks this of the masks of static caches, which the layers refuse."""
        return self

    def __getitem__(self, part: Any) -> torch.Tensor:
        """What layers that are not ours ask of a mask."""
        raise ValueError(NOT_OURS)

    def packed(
        self,
        position_ids: torch.Tensor,
        device: torch.device,
        layer: PagedLayer | None,
        *,
        consecutive: bool,
        separate: bool,
    ) -> "Pass | None":
        """The pass, its tokens packed, the same for all layers on a device; None if there are no tokens. With `layer`,
        which has room for them, after what it holds.

        consecutive  whether positions have to be; else any positions are taken, which only rope looks at
        separate     whether another sequence begins where positions do not go on, if there is no mask: as transformers
                     has it, in a pass that was called without a cache. The pass's first layer decides for all layers:
                     checkpointing takes the cache from some of them
        """
        if self._separate is None:
            self._separate = separate and self.mask is None
        key = device, None if layer is None else layer.pages_each
        if key not in self._passes:
            self._passes[key] = self._pack(position_ids.to(device), layer, consecutive)
        return self._passes[key]

    def counts(self, layer: PagedLayer | None) -> list[int]:
        """Of each row of the batch, how many of its new rows are tokens."""
        if not hasattr(self, "_counts"):
            self._counts = self._count(layer)
        return self._counts

    def _count(self, layer: PagedLayer | None) -> list[int]:
        held = [0] * self.batch_size if layer is None else layer.lens
        seen = 0 if layer is None else layer.seen
        if self.mask is None:
            if any(n != seen for n in held):
                raise ValueError("attention_mask: is needed after a pass with padding, got None")
            return [self.new] * self.batch_size
        if self.mask.shape[1] != seen + self.new:
            raise ValueError(
                f"attention_mask: must have a column for each of {seen} earlier and {self.new} new tokens, got shape "
                f"{list(self.mask.shape)}"
            )
        both = torch.stack((self.mask[:, seen:].sum(1), self.mask[:, :seen].sum(1)))
        new, earlier = both.tolist()
        if earlier != held:
            raise ValueError(
                f"attention_mask: must show the earlier tokens that {CACHE} holds, {held} of each sequence, "
                f"got {earlier}"
            )
        return new

    def _pack(self, position_ids: torch.Tensor, layer: PagedLayer | None, consecutive: bool) -> "Pass | None":
        new, device = self.counts(layer), position_ids.device
        if not any(new):
            return None
        positions = position_ids.expand(self.batch_size, -1).flatten()
        rows = None
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
                f"position_ids: must be consecutive where some layers of a pass have {CACHE} and others, such "
                "as checkpointed ones, have none; got others. Several sequences in a row need use_cache=False"
            )
        offsets = [0] * self.batch_size
        if consecutive and (first := int(positions.min())) < 0:
            raise ValueError(f"position_ids: must be at least 0 in models that compress tokens, got {first}")
        if consecutive and not (layer is None and self._separate):
            held = [layer.position_offsets[b] if layer is not None and layer.lens[b] else None for b in present]
            for b, offset in zip(present, _position_offsets(positions, batch, held)):
                offsets[b] = offset
        return Pass(batch, positions, rows, (self.batch_size, self.new), offsets)


@dataclass
class Pass:
    """T tokens of sequences, packed.

    positions  int64 [T]: those that the caller gave
    rows       int64 [T]: which of the B * S rows the tokens are; None if all are
    shape      (B, S)
    offsets    of each row of the batch, by how much positions are above the tokens' numbers, if they are consecutive
    """

    batch: SequenceBatch
    positions: torch.Tensor
    rows: torch.Tensor | None
    shape: tuple[int, int]
    offsets: list[int]
    _angles: dict[Any, tuple[Any, RopeAngles]] = field(default_factory=dict)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D] -> [T, D]."""
        x = x.flatten(0, 1)
        return x if self.rows is None else x[self.rows]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [B, S, D], 0 in rows of padding."""
        if self.rows is not None:
            x = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1]).index_copy(0, self.rows, x)
        return x.unflatten(0, self.shape)

    def angles(self, rope: tuple[torch.Tensor, torch.Tensor], channels: int) -> RopeAngles:
        """(cos, sin) fp32 [T, channels / 2] of transformers' [B or 1, S, channels or channels / 2]; kept for all
        layers that get the same."""

        def of_tokens() -> RopeAngles:
            parts = [part[..., : channels // 2].expand(self.shape[0], -1, -1) for part in rope]
            # A list: torch.compile traces no tuple that is made of a generator.
            return RopeAngles([self.pack(part).float().contiguous() for part in parts])

        return self._kept(id(rope[0]), rope, of_tokens)

    def entry_angles(self, rotary: torch.nn.Module, ratio: int, like: torch.Tensor) -> RopeAngles:
        """(cos, sin) of the entries of `ratio` tokens that the tokens may end: of the positions where these begin."""

        def of_entries() -> RopeAngles:
            positions = (self.positions + (1 - ratio)).clamp(min=0)[None]
            cos_sin = rotary(like, position_ids=positions, layer_type="compress")
            return RopeAngles([part[0].float().contiguous() for part in cos_sin])

        return self._kept(("entries", ratio), None, of_entries)

    def _kept(self, key: Any, source: Any, make: Callable[[], RopeAngles]) -> RopeAngles:
        if key not in self._angles:  # the source is kept, too, or its id might become another's
            self._angles[key] = source, make()
        return self._angles[key][1]


def _runs(positions: torch.Tensor, batch_size: int) -> tuple[int, ...]:
    """Lengths of the runs of consecutive positions, each within a row of the batch."""
    breaks = positions.diff() != 1
    each = len(positions) // batch_size
    breaks[each - 1 :: each] = True
    ends = [*(breaks.nonzero().squeeze(1) + 1).tolist(), len(positions)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends))


def _position_offsets(positions: torch.Tensor, batch: SequenceBatch, held: Sequence[int | None]) -> list[int]:
    """By how much the positions of each sequence are above its tokens' numbers, which is what it was by (`held`; None
    for a sequence that begins). Entries of compressed tokens are where their tokens are: positions must go on."""
    offsets = positions - batch.positions
    of_sequences = offsets[batch.last_tokens]
    constant = (offsets == of_sequences[batch.sequences.long()]).all()
    *found, constant = torch.cat((of_sequences, constant[None].to(offsets.dtype))).tolist()
    if not constant or any(was is not None and was != now for was, now in zip(held, found)):
        raise ValueError(
            f"position_ids: must be consecutive within a sequence, and go on where {CACHE} ends, for models "
            "that compress tokens; got others. Several sequences in a row need use_cache=False and no attention_mask"
        )
    return found
