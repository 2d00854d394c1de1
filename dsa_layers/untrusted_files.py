"""Read the text and JSON files of a checkpoint, which an untrusted author may have written."""

import json
from pathlib import Path
from typing import Any

from dsa.runtime.checks import shown_json

ACCEPTED = (
    "accepted: Hugging Face's safetensors, in bfloat16, float16 or float32, or in DeepSeek's FP8 (quant_method 'fp8', "
    "e4m3, weight_block_size [128, 128]), of DeepSeek-V4 also with experts in FP4"
)
# (file pattern, description) of files in formats that dsa does not read
_OTHER_FORMATS = (
    ("*.gguf", "GGUF, which llama.cpp reads"),
    (
        "adapter_config.json",
        "an adapter (LoRA) and no model; merge it into its base model first (peft: merge_and_unload)",
    ),
    ("model*-mp*.safetensors", "shards of DeepSeek's own inference code, which its convert.py writes"),
    ("consolidated*.safetensors", "Mistral's consolidated files"),
    ("consolidated*.pth", "Meta's consolidated files"),
    ("pytorch_model*.bin", "PyTorch's pickled files; save the model as safetensors (safe_serialization=True)"),
    ("*.distcp", "a distributed checkpoint of torch; save it as safetensors"),
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def found_instead(directory: Path) -> str:
    """Return the end of an error message about a missing file. It names a file of `directory` in another format, or is
    empty if there is no such file."""
    for pattern, what in _OTHER_FORMATS:
        files = sorted(path.name for path in directory.glob(pattern))
        if files:
            return f"; {shown_json(files[0])[1:-1]} is {what}; {ACCEPTED}"
    return ""


def check_no_pointer(path: Path, error: type[ValueError]) -> None:
    """Raise `error` if `path` is a git-LFS pointer, or not a regular file (reading a pipe could block indefinitely).
    Raise OSError if the file cannot be read."""
    if path.exists() and not path.is_file():
        raise error(f"{path}: must be a file")
    with path.open("rb") as stream:
        head = stream.read(len(_LFS_POINTER))
    if head == _LFS_POINTER:
        raise error(f"{path}: is a git-LFS pointer in place of the file; `git lfs pull` fetches the file itself")


def read_text(path: Path, error: type[ValueError], max_bytes: int) -> str:
    """Return the text of a UTF-8 file. Raise `error` if the file is missing, is not UTF-8 text, is larger than
    `max_bytes`, cannot be read, or fails `check_no_pointer`."""
    try:
        check_no_pointer(path, error)
        with path.open("rb") as stream:
            content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise error(f"{path}: has {path.stat().st_size} bytes; accepted: at most {max_bytes}")
        return content.decode("utf-8")
    except FileNotFoundError:
        raise error(f"{path}: no such file{found_instead(path.parent)}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem


def read_json_object(path: Path, error: type[ValueError], max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the file `path`. Raise `error` if the file has no JSON object, or as `read_text`
    does."""
    text = read_text(path, error, max_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:  # ValueError also for integers with too many digits
        raise error(f"{path}: not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object, got {shown_json(value)}")
    return value
