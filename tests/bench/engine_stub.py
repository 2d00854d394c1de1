"""An engine for the processes of dsa_bench.engines. Its answers depend only on how often the benchmark asks."""

import asyncio
import os
from pathlib import Path


class Engine:
    def __init__(self, model, vocabulary, cache_gib, options=None):
        print("the engine writes to standard output")
        self.vocabulary, self.asked, self.model = vocabulary, 0, Path(model)

    async def stream(self, prompt, tokens):
        if self.model.name == "dies":
            raise SystemExit("out of memory")
        for _ in range(tokens):
            await asyncio.sleep(0.001)
            yield 1

    async def ask(self, method):
        if method == "peak_gib":
            self.asked += 1
            with (self.model / "turns").open("a") as file:
                file.write(os.environ["DSA_ENGINE"])
            return self.asked
        return [[os.environ["DSA_ENGINE"], 1.5, 2]] if method == "trace_stop" else None

    def close(self):
        (self.model / f"closed {os.environ['DSA_ENGINE']}").touch()
