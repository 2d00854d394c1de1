"""The language model's targets over packed sequences."""

import torch

from dsa.reference.training.packed_sequences import boundaries
from dsa.runtime.checks import INT32, check_tensor
from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.parallel.context import ContextBatch

IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out


def next_tokens(tokens: torch.Tensor, sequences: SequenceBatch | torch.Tensor) -> torch.Tensor:
    """int64 [T]: the token that follows each token in its own sequence, and -100 for a sequence's last token.

        targets = next_tokens(tokens, batch)
        loss = torch.nn.functional.cross_entropy(model(tokens, batch, all_tokens=True), targets)

    -100 is the default `ignore_index` of cross_entropy, whose mean is over the other targets.

    tokens     int64 [T]: packed sequences, one after the other
    sequences  the SequenceBatch of these tokens, or int32 [B + 1], cu_seqlens: where sequences begin, from 0 to T. For
               a rank's share of the tokens (`IndexerStage.share`) `tokens` are all ranks', as `share.own` takes them

    Raises TypeError or ValueError that names the argument; cu_seqlens on a GPU are not looked at.
    """
    check_tensor("tokens", tokens, (torch.int64,), ("T",))
    if not isinstance(sequences, SequenceBatch | torch.Tensor):
        accepted = "a SequenceBatch or int32 [B + 1], where sequences begin"
        raise TypeError(f"sequences: must be {accepted}, got {type(sequences).__name__}")
    if isinstance(sequences, ContextBatch):
        owners = packing.owners(sequences.lens, sequences.device)
    elif isinstance(sequences, SequenceBatch):
        owners = sequences.sequences
    else:
        check_tensor("sequences", sequences, INT32, ("B+1",))
        if not sequences.is_cuda:
            boundaries("sequences", sequences, ("tokens", tokens))
        rows = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        owners = torch.searchsorted(sequences, rows, right=True)
    check_tensor("tokens", tokens, (torch.int64,), (len(owners),), "sequences")
    targets = torch.full_like(tokens, IGNORED)
    targets[:-1] = torch.where(owners[1:] == owners[:-1], tokens[1:], IGNORED)
    return targets
