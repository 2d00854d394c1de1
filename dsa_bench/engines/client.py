"""Run a load on an engine and measure it from the client's side."""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from dsa_bench.engines.loads import Load

LIKELY = 5


class Engine(Protocol):
    vocabulary: int

    def stream(self, prompt: Sequence[int], tokens: int) -> AsyncIterator[int]:
        """Generate `tokens` tokens after a prompt; yield how many new ones arrived."""
        ...

    async def answer(self, prompt: Sequence[int], tokens: int, logprobs: bool) -> dict[str, Any]:
        """Return `logprobs`, of the prompt's tokens but the first if asked for; `tokens`, generated greedily; and
        `likely`, for each of these the LIKELY most likely tokens as (token, log-probability)."""
        ...


async def run(engine: Engine, load: Load, seed: int) -> dict[str, float]:
    """Run a load. Return the figures: seconds, ms, tokens/s.

    `ms_per_step` is measured from when the last request has its first token to when the first request is done.
    """
    prompts = load.prompts(seed, engine.vocabulary)
    start = time.perf_counter()
    requests = await asyncio.gather(
        *(
            _request(engine, prompt, load.tokens, start + delay)
            for prompt, delay in zip(prompts, load.arrivals(seed), strict=True)
        )
    )
    end = max(times[-1][0] for _, times in requests)
    firsts = [1e3 * (times[0][0] - arrived) for arrived, times in requests]
    figures = {
        "seconds": end - start,
        "tokens_per_second": load.count * (load.length + load.tokens - 1) / (end - start),
        "first_token_ms": statistics.median(firsts),
        "first_token_ms_99": _percentile(firsts, 0.99),
    }
    if load.tokens > 1:
        gaps = [1e3 * gap for _, times in requests for gap in _gaps(times)]
        figures |= {"between_ms": statistics.median(gaps), "between_ms_99": _percentile(gaps, 0.99)}
    if load.tokens > 1 and load.rate is None:
        begin, done = max(times[0][0] for _, times in requests), min(times[-1][0] for _, times in requests)
        steps = sum(count for _, times in requests for at, count in times if begin < at <= done) / load.count
        figures["ms_per_step"] = 1e3 * (done - begin) / max(steps, 1)
    return figures


async def answered(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, together: bool, logprobs: bool
) -> list[dict[str, Any]]:
    """`Engine.answer` of each prompt, sent all at once or one after the other."""
    if together:
        return await asyncio.gather(*(engine.answer(prompt, tokens, logprobs) for prompt in prompts))
    return [await engine.answer(prompt, tokens, logprobs) for prompt in prompts]


async def _request(
    engine: Engine, prompt: Sequence[int], tokens: int, arrival: float
) -> tuple[float, list[tuple[float, int]]]:
    """(when the request arrived, [(when, how many new tokens)])."""
    await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
    arrived, times = time.perf_counter(), []
    async for count in engine.stream(prompt, tokens):
        times.append((time.perf_counter(), count))
    if sum(count for _, count in times) != tokens:
        raise RuntimeError(f"the engine generated {sum(count for _, count in times)} tokens of {tokens}")
    return arrived, times


def _gaps(times: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between a request's tokens; tokens that arrived together share their gap evenly."""
    return [(at - before) / count for (before, _), (at, count) in itertools.pairwise(times) for _ in range(count)]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
