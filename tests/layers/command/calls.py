"""A call of `dsa generate` for tests."""

from pathlib import Path

from dsa_layers.command.main import main

PROMPT = "The lightning indexer"
TOKENS = 8


def generate(checkpoint: Path | str, *options: object, prompts: tuple[str, ...] = (PROMPT,)) -> int:
    """Run `dsa generate` and return its exit code. `options` override the options below."""
    named = [part for prompt in prompts for part in ("--prompt", prompt)]
    size = ["--max-tokens", str(TOKENS), "--cache-tokens", "1024", "--temperature", "0"]
    return main(["generate", str(checkpoint), "--device", "cpu", *named, *size, *map(str, options)])
