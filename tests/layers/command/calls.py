"""How tests call `dsa generate`."""

from pathlib import Path

from dsa_layers.command.main import main

PROMPT = "The lightning indexer"
TOKENS = 8


def generate(checkpoint: Path | str, *options: object, prompts: tuple[str, ...] = (PROMPT,)) -> int:
    """Greedy, unless the options say otherwise: the last of an option counts."""
    named = [part for prompt in prompts for part in ("--prompt", prompt)]
    size = ["--max-tokens", str(TOKENS), "--cache-tokens", "1024", "--temperature", "0"]
    return main(["generate", str(checkpoint), "--device", "cpu", *named, *size, *map(str, options)])


def replace(path: Path, content: bytes) -> None:
    """Of a file that may be a link to one that must stay."""
    path.unlink()
    path.write_bytes(content)
