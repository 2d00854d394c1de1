"""A process that holds one engine and runs loads on it: one line of JSON in, one line of JSON out."""

import asyncio
import importlib
import json
import os
import sys
from typing import Any

from dsa_bench.engines.client import answered, run
from dsa_bench.engines.loads import Load


async def main(engine: str, model: str, vocabulary: int, cache_gib: int, options: dict[str, Any], answers: int) -> None:
    held = importlib.import_module(f"dsa_bench.engines.{engine}").Engine(model, vocabulary, cache_gib, options)
    loop = asyncio.get_running_loop()

    def answer(fields: dict[str, Any]) -> None:
        os.write(answers, (json.dumps(fields) + "\n").encode())

    answer({"started": True})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        if "answers" in asked:
            prompts = asked.pop("answers")
            answer({"answers": await answered(held, prompts, **asked)})
            continue
        load = Load(**asked["load"])
        if asked["trace"]:
            await held.ask("trace_start")
        await held.ask("peak_gib")
        figures = await run(held, load, asked["seed"])
        figures["peak_gib"] = await held.ask("peak_gib")
        answer({"figures": figures, "kernels": await held.ask("trace_stop") if asked["trace"] else None})
    held.close()


if __name__ == "__main__":
    # The engine writes to standard output; answers go to what was standard output.
    answers = os.dup(1)
    os.dup2(2, 1)
    name, directory, vocabulary, cache_gib, *options = sys.argv[1:]
    asyncio.run(
        main(name, directory, int(vocabulary), int(cache_gib), json.loads(options[0] if options else "{}"), answers)
    )
