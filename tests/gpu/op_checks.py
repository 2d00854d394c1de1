"""Checks and inputs that GPU tests of many ops share."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dsa.testing import poisoned


def flat(results: Any) -> list[torch.Tensor]:
    """Return all tensors in `results`, a tensor or nested lists and tuples. Numbers and None are left out."""
    if isinstance(results, torch.Tensor):
        return [results]
    if not isinstance(results, (list, tuple)):
        return []
    return [x for part in results for x in flat(part)]


def assert_same_bits(got: Any, expected: Any) -> None:
    for g, e in zip(flat(got), flat(expected), strict=True):
        assert (g.dtype, g.shape) == (e.dtype, e.shape)
        ours, theirs = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (g, e))
        assert torch.equal(ours, theirs), f"{int((ours != theirs).sum())} of {ours.numel()} bytes differ"


def assert_equal(got: Any, expected: Any) -> None:
    """Like `assert_same_bits`, but any NaN equals any other NaN, and -0.0 equals 0.0."""
    for g, e in zip(flat(got), flat(expected), strict=True):
        assert (g.dtype, g.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(g.float(), e.float(), rtol=0, atol=0, equal_nan=True)


def assert_runs_have_the_same_bits(op: Callable[..., Any], *arguments: Any, times: int = 20, **options: Any) -> None:
    first = op(*arguments, **options)
    for _ in range(times):
        assert_same_bits(op(*arguments, **options), first)


def assert_rows_stand_alone(
    run: Callable[[Any], Any], given: dict[str, Any], names: Iterable[str], parts: Iterable[Any]
) -> list[torch.Tensor]:
    """Check that a call with only some rows of the named arguments gives the bits of the whole call. parts: the rows of
    each call, as a slice or an index tensor

    -> the results of the whole call
    """
    whole = flat(run(given))
    for rows in parts:
        part = {name: given[name][rows] for name in names if given[name] is not None}
        assert_same_bits(run(given | part), [x[rows] for x in whole])
    return whole


def captured(op: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return (the graph of a call, its results). A call before the capture compiles and loads the kernels, which a
    capture does not allow."""
    op(*arguments, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = op(*arguments, **options)
    return graph, results


def replays(
    op: Callable[..., Any], given: Any, renew: Callable[[], Any], times: int = 3, **options: Any
) -> Iterator[Any]:
    """Yield the results of a captured op(*given, **options) after each replay. Before a replay the tensors that `renew`
    returns are copied into `given`."""
    graph, results = captured(op, *given, **options)
    for _ in range(times):
        for held, new in zip(flat(given), flat(renew()), strict=True):
            held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        yield results


def on_a_late_stream(change: Callable[[], Any], op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run `change` and then the op on a new stream that is busy at first.

    If the op launched a kernel on another stream, that kernel would read the arguments before they change.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        change()
        results = op(*arguments, **options)
    stream.synchronize()
    return results


def among_nan(x: torch.Tensor, before: int = 16, after: int = 16) -> torch.Tensor:
    """Return a view with the numbers of x: columns of wider rows, among NaN (see `poisoned` for integer tensors)."""
    end = before + x.shape[-1]
    wide = poisoned((*x.shape[:-1], end + after), x.dtype, x.device)
    wide[..., before:end] = x
    return wide[..., before:end]


def at_other_strides(x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of equal tensors with different strides. Memory between the numbers of the second contains NaN (see
    `poisoned` for integer tensors)."""
    yield x, among_nan(x)
    yield x, among_nan(x, 1, 2)  # rows do not start at multiples of 16 bytes
    yield x, poisoned((*x.shape, 2), x.dtype, x.device)[..., 0].copy_(x)
    yield x, poisoned((2 * len(x), *x.shape[1:]), x.dtype, x.device)[::2].copy_(x)
    for dim in {1, x.dim() - 1} if x.dim() > 1 else ():
        yield x, x.transpose(0, dim).contiguous().transpose(0, dim)
    if x.is_floating_point():
        first = x[:1].expand_as(x)
        yield first.contiguous(), first


def far_apart(cache: torch.Tensor) -> torch.Tensor:
    """Return a copy of a cache of at least four pages, in 6 GiB of memory. The last page begins more than 2^32 bytes
    after the first page. For two-byte dtypes this is also more than 2^31 elements."""
    stride = 6 * 2**30 // (len(cache) * cache.element_size()) // 576 * 576
    memory = poisoned((len(cache) * stride,), cache.dtype, cache.device)
    return memory.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)
