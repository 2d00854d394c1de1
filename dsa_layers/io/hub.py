"""A model's id on the Hugging Face hub in the place of a checkpoint's directory.

huggingface_hub, an extra, downloads what is not in its cache. Its own environment variables apply, among them HF_HOME,
HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN.
"""

import importlib.util
import os
import re
from os import PathLike
from pathlib import Path

from dsa_layers.arguments import path_of
from dsa_layers.errors import CheckpointError
from dsa_layers.other_formats import ACCEPTED
from dsa_layers.untrusted_files import is_there, read_json_object

INSTALL = "pip install 'dsa-kernels[hub]'"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_URL = re.compile(r"https?:/")  # of which a Path has one slash
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_INDEX, _MAX_INDEX_VALUES = 2**25, 2**19  # bytes, and values
# What is read beside the weights. A repository may also hold the same weights in other formats.
_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *(_INDEX, "hf_quant_config.json"),
)


def checkpoint_directory(name: str | PathLike[str], *, weights: bool = True) -> Path:
    """The directory of a checkpoint: `name` itself if that exists or can be no hub id, which is OWNER/NAME; else where
    huggingface_hub keeps the model of this id.

    weights  whether these are wanted too, and not only configuration, tokenizer and chat template
    Raises ImportError, which says what to install, where huggingface_hub is missing, and CheckpointError (a ValueError)
    for an id that the hub does not know, and, where the hub is not reached, for one that its cache does not hold, and
    for a GGUF file and a URL;
    TypeError for what is no string and no path.
    """
    path, text = path_of("directory", name), os.fspath(name)
    if _URL.match(text):
        raise CheckpointError(f"{text}: is a URL; accepted: a directory or a hub id, OWNER/NAME")
    if path.suffix == ".gguf" and path.is_file():
        raise CheckpointError(f"{text}: is GGUF, which llama.cpp reads; {ACCEPTED}")
    if os.path.lexists(path) or not _ID.fullmatch(text):
        return path
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportError(f"{text}: no such directory; to find it on the hub, {INSTALL}")
    directory = _snapshot(text, _FILES)
    if not weights:
        return directory
    files = _weight_files(directory)
    if not files:
        return directory
    # Of the same commit, whatever has been uploaded in between.
    directory = _snapshot(text, files, directory.name)
    missing = [file for file in files if not (directory / file).exists()]
    if missing:
        raise CheckpointError(f"{text}: {directory} lacks {len(missing)} of {len(files)} weight files, as {missing[0]}")
    return directory


def has_weights(directory: Path) -> bool:
    """Whether all weight files are in a directory: that of an id may hold some of them only, after a download that was
    interrupted."""
    return all((directory / file).exists() for file in _weight_files(directory))


def _snapshot(name: str, files: tuple[str, ...], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except HFValidationError as error:
        problem = f"it is no hub id: {_first_line(error)}"
    except RepositoryNotFoundError:
        problem = "the hub has no such model, or shows it only to some of those who have logged in (HF_TOKEN)"
    except LocalEntryNotFoundError:
        problem = "the hub's cache does not hold it, and the hub is not reached (HF_HUB_OFFLINE, or no connection)"
    except Exception as error:  # of the network's many libraries
        problem = f"the hub does not give it: {type(error).__name__}: {_first_line(error)}"
    raise CheckpointError(f"{name}: no such directory; {problem}")


def _weight_files(directory: Path) -> tuple[str, ...]:
    """What the index names; what is wrong with one says `Checkpoint`, which reads it in earnest."""
    if not is_there(directory / _INDEX):
        return (_SINGLE,)
    try:
        names = read_json_object(directory / _INDEX, CheckpointError, _MAX_INDEX, _MAX_INDEX_VALUES).get("weight_map")
    except CheckpointError:
        return ()
    files = set(names.values()) if isinstance(names, dict) and all(map(_is_name, names.values())) else set()
    return tuple(sorted(files))


def _is_name(file: object) -> bool:
    """Whether it names one file: what is downloaded is asked for by patterns."""
    return isinstance(file, str) and re.fullmatch(r"[\w.-]+", file, re.ASCII) is not None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
