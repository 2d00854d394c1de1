"""A model's id on the Hugging Face hub in place of a checkpoint's directory.

huggingface_hub, an extra, downloads the files that its cache lacks. Its own environment variables apply, among them
HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN.
"""

import importlib.util
import os
import re
from os import PathLike
from pathlib import Path

from dsa_layers.arguments import path_of
from dsa_layers.errors import CheckpointError
from dsa_layers.other_formats import ACCEPTED

INSTALL = "pip install 'dsa-kernels[hub]'"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_URL = re.compile(r"https?:/")  # a Path has one slash here
_FILES = ("*.json", "*.jinja")
_WEIGHTS = ("*.safetensors",)
_IGNORED = ("*/*", "consolidated*")  # the same weights in other formats


def checkpoint_directory(name: str | PathLike[str], *, weights: bool = True) -> Path:
    """The directory of a checkpoint: `name` itself if that exists or can be no hub id, which is OWNER/NAME; else where
    huggingface_hub keeps the model of this id.

    weights  whether weights are needed too, and not only configuration, tokenizer and chat template
    Raises ImportError, which says what to install, where huggingface_hub is missing. Raises CheckpointError (a
    ValueError) for an id that the hub does not know, for an id that the cache does not hold if the hub cannot be
    reached, and for a GGUF file or a URL. Raises TypeError unless `name` is a string or a path.
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    files = [*_FILES, *(_WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(text, allow_patterns=files, ignore_patterns=list(_IGNORED)))
    except HFValidationError as error:
        problem = f"it is no hub id: {_first_line(error)}"
    except RepositoryNotFoundError:
        problem = "the hub has no such model, or shows it only to some of those who have logged in (HF_TOKEN)"
    except LocalEntryNotFoundError:
        problem = "the hub's cache does not hold it, and the hub is not reached (HF_HUB_OFFLINE, or no connection)"
    except Exception as error:  # any of the network libraries' exceptions
        problem = f"the hub does not give it: {type(error).__name__}: {_first_line(error)}"
    raise CheckpointError(f"{text}: no such directory; {problem}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
