"""The ranks over which a model is split: their process group, their collectives, and errors that all ranks raise."""

import atexit
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

import dsa
from dsa.kernels.moe.limits import CHANNEL_MULTIPLE
from dsa.parallel.one_shot_sum import one_shot_sum, takes, takes_experts
from dsa.parallel.peer_copies import PeerCopies, peer_copies
from dsa.runtime.checks import integer

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# With at least this many rows per rank, each rank sums some of the rows and all ranks gather the results, which sends
# fewer bytes than gathering all summands.
SHARED_SUM_ROWS = 16


@dataclass(frozen=True)
class Ranks:
    """The processes that hold parts of a model.

    rank   the rank of this process, from 0
    size   the number of ranks
    group  the process group of these ranks; None for torch's default group, or if there is one rank

    Raise TypeError or ValueError unless size is an integer of at least 1 and rank is in [0, size)."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        size = integer("size", self.size, at_least=1)
        integer("rank", self.rank, at_least=0, at_most=size - 1)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Self:
        """Return the `Ranks` of `group`, or of the default group for None. Raise RuntimeError if torch.distributed is
        not initialised, and ValueError if this process is not in the group."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group: torch.distributed is not initialised: call init_process_group before")
        group = group or dist.group.WORLD
        if dist.get_rank(group) < 0:
            raise ValueError("group: this process must be one of its ranks, got a group of other processes")
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x [T, ...], added in fp32 (fp64 for fp64) in the order of the ranks and rounded
        once. The result has the same bits on every rank and in every run, and a row does not depend on other rows.
        Raise ValueError if gradients are enabled and x requires them."""
        if self.size == 1:
            return x
        check_no_gradient(x)
        x, rows = x.contiguous(), len(x)
        if self.group is not None and takes(x, self.size):
            one_shot = one_shot_sum(self.group, x.device)
            if one_shot is not None:
                return one_shot(x)
        if rows < SHARED_SUM_ROWS * self.size:
            return self.sum_parts(self._gathered(x))
        padded = -(-rows // self.size) * self.size
        if padded != rows:
            x = torch.cat((x, x.new_zeros(padded - rows, *x.shape[1:])))
        parts = torch.empty_like(x)
        self.all_to_all(parts, x)
        own = self.sum_parts(parts.unflatten(0, (self.size, -1)))
        return self._gathered(own).flatten(0, 1)[:rows]

    def sum_of_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `sum` of the ranks' dsa.combine_experts(y, rows, weights, shared)."""
        if self.size > 1:
            check_no_gradient(y)
        if self.size > 1 and self.group is not None and takes_experts(y, rows, weights, shared, self.size):
            one_shot = one_shot_sum(self.group, y.device)
            if one_shot is not None:
                return one_shot.of_experts(y, rows, weights, shared)
        return self.sum(dsa.combine_experts(y, rows, weights, shared))

    def sum_parts(
        self, parts: torch.Tensor, shared: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum [T, ...] of parts [size, T, ...], all on this rank, added and rounded as in `sum`.

        shared    [T, ...] or None: the last summand, added before rounding
        residual  [T, ...] or None: added to the rounded sum
        """
        size, rows = parts.shape[:2]
        if size == 2 and shared is None and residual is None:  # PyTorch adds two 16-bit tensors in fp32 and rounds once
            return parts[0] + parts[1]
        columns = parts[0, 0].numel() if rows else 0
        if parts.dtype == torch.float64 or columns % CHANNEL_MULTIPLE or torch.is_grad_enabled():
            total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
            for part in (*parts[1:], *(() if shared is None else (shared,))):
                total = total + part
            total = total.to(parts.dtype)
            return total if residual is None else residual + total
        # `combine_experts` computes this sum if the experts of token t have the rows t, rows + t, 2 * rows + t, ...
        of_ranks = torch.arange(size * rows, dtype=torch.int32, device=parts.device).view(size, rows).T
        own = (x if x is None else x.reshape(rows, columns) for x in (shared, residual))
        return dsa.combine_experts(parts.reshape(size * rows, columns), of_ranks, None, *own).view(parts.shape[1:])

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Join the ranks' x [..., C] along the last dimension in the order of the ranks. Return [..., size * C]."""
        if self.size == 1:
            return x
        check_no_gradient(x)
        return self._gathered(x.contiguous()).movedim(0, -2).flatten(-2)

    def copies(self, x: torch.Tensor) -> PeerCopies | None:
        """Return the `PeerCopies` of x's device, or None if the device or group does not support them. Also return None
        during CUDA graph capture, because a graph cannot contain these copies."""
        if self.group is None or not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        return peer_copies(self.group, x.device)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return [size, ...]: every rank's contiguous x [...]."""
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        if x.numel():
            self.all_gather(parts, x)
        return parts.unflatten(0, (self.size, len(x)))

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor, *, async_op: bool = False) -> dist.Work | None:
        """Write the ranks' x [N, ...] to `parts` [size * N, ...] in the order of the ranks. Return the pending work if
        `async_op`, else None."""
        return _all_gather(parts, x, group=self.group, async_op=async_op)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Send rows of `sent` to each rank, and receive rows from each rank in `received`, both in the order of the
        ranks. Return the pending work if `async_op`, else None.

        received_rows, sent_rows  the number of rows from each rank and to each rank; None for equal numbers
        """
        return dist.all_to_all_single(received, sent, received_rows, sent_rows, group=self.group, async_op=async_op)


ALONE = Ranks(0, 1)


def check_no_gradient(*sent: torch.Tensor) -> None:
    """Raise ValueError if gradients are enabled and a tensor in `sent` requires them: collectives would lose the
    gradients."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in sent):
        raise ValueError(
            "requires_grad: a part of a model takes no gradient; accepted: False of all of its parameters, or a pass "
            "under torch.no_grad(), got True"
        )


def ranks_of(mesh: "dist.DeviceMesh | Ranks | None") -> Ranks:
    """Return the `Ranks` of a one-dimensional mesh, `mesh` itself if it is a `Ranks`, or ALONE for None. Raise
    TypeError for other types, and ValueError if the mesh has several dimensions or does not contain this process."""
    if mesh is None or isinstance(mesh, Ranks):
        return mesh or ALONE
    if not isinstance(mesh, dist.DeviceMesh):
        raise TypeError(f"mesh: must be a DeviceMesh, Ranks or None, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh: must have one dimension, got {mesh.ndim}; one of several is mesh[its name]")
    return Ranks.of(mesh.get_group())


# How long a rank waits for the others, one of which may be reading large files or compiling. If a rank fails, the
# launcher ends the others before this timeout.
TIMEOUT = timedelta(hours=2)


def join(device: str) -> tuple[Ranks, torch.device]:
    """Join the process group, which waits for all ranks. Return the `Ranks` and this rank's device.

    device  "cuda": the GPU whose index is LOCAL_RANK, with NCCL; "cpu": the CPU, with gloo. It must be the same on all
            ranks

    Raise ValueError if the GPU is missing.
    The NCCL group is not destroyed at exit, because its destruction would wait for CUDA graphs with its collectives."""
    if device == "cpu":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        # A gloo thread that needs the Python interpreter while the interpreter shuts down would abort the process.
        atexit.register(_leave)
        return Ranks.of(), torch.device("cpu")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ValueError(f"gpus: rank {local} needs a GPU of its own, and torch sees {torch.cuda.device_count()}")
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own, timeout=TIMEOUT)
    return Ranks.of(), own


def _leave() -> None:
    """Destroy the group. The group's threads end when the last reference to the group is dropped. Frames of an
    exception may hold a reference, so run the garbage collector too."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def gathered(ranks: Ranks, value: Any) -> list[Any]:
    """Return every rank's `value`, in the order of the ranks. Without a process group, return [value]."""
    if ranks.size == 1 or not dist.is_initialized():
        return [value]
    values = [value] * ranks.size
    dist.all_gather_object(values, value, group=ranks.group)
    return values


def agreed(ranks: Ranks, make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0, and return its result on all ranks. If `make` fails, all ranks raise
    (`raise_on_all_ranks`)."""
    with raise_on_all_ranks(ranks):
        made = make() if ranks.rank == 0 else None
    return gathered(ranks, made)[0]


@contextlib.contextmanager
def raise_on_all_ranks(ranks: Ranks, error: type[ValueError] = ValueError) -> Iterator[dict[str, Any]]:
    """If a rank raises an exception in this context, raise an exception on all ranks. A failed rank raises its own
    exception, converted to an `error` if it is a RuntimeError, MemoryError or OSError. The other ranks raise an `error`
    that names the first failed rank.

    The context yields a dictionary of facts. It contains DSA_BACKEND, and the caller adds further facts. If no rank
    fails, but a fact of a rank differs from rank 0's, all ranks raise an `error` that names the fact. With one rank or
    without a process group, nothing is exchanged or converted.
    """
    facts: dict[str, Any] = {"DSA_BACKEND": os.environ.get("DSA_BACKEND") or "unset"}
    if ranks.size == 1 or not dist.is_initialized():
        yield facts
        return
    try:
        yield facts
    except Exception as problem:
        said = str(problem) or type(problem).__name__
        gathered(ranks, (said, facts))
        if isinstance(problem, RuntimeError | MemoryError | OSError):
            raise error(said) from problem
        raise
    of_ranks = gathered(ranks, (None, facts))
    problems = [f"{problem} (rank {rank})" for rank, (problem, _) in enumerate(of_ranks) if problem is not None]
    first = of_ranks[0][1]
    problems += [
        f"{name}: must be the same on all ranks, got {first.get(name)} on rank 0 and {value} on rank {rank}"
        for rank, (_, found) in enumerate(of_ranks)
        for name, value in found.items()
        if value != first.get(name)
    ]
    if problems:
        raise error(problems[0])
