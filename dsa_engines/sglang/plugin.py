"""SGLang's plugin: it waits until SGLang makes an attention backend of one of these models, and then replaces what that
calls, before the backend is there and long before a request or a CUDA graph.

SGLang loads plugins in all of its processes, most of which have no model. So `register` imports nothing heavy and
replaces nothing but the functions that make the two backends, by SGLang's own registry. When one of them is called, the
GPU is chosen, the cache is allocated and the model known: everything that has to be there is looked up, kernels are
compiled, and hooks are installed by SGLang's HookRegistry. They are of the type AROUND, which gets the function that it
replaces. Where anything is missing or of another form, one line says so, and SGLang stays as it is.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsa.runtime import backends
from dsa_engines.replacements import NotFound, check_parameters, find
from dsa_engines.sglang import layouts, renamed, seams
from dsa_engines.sglang.warm_up import warm_up
from dsa_engines.switch import declined, enabled_ops, tested_version

ENGINE = "sglang"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
OVERRIDE = f"{REGISTRY}:register_attention_backend"
PARALLEL, SPECULATION = (f"sglang.srt.runtime_context:{name}" for name in ("get_parallel", "get_spec"))
# The names of backends in SGLang's registry, and the backend that each stands for.
FAMILIES = {"dsa": "dsa", "nsa": "dsa", "dsv4": "dsv4"}
MODELS = {"dsa": layouts.v32_model, "dsv4": layouts.v4_model}
_logger = logging.getLogger("dsa")
_decided: dict[str, bool] = {}  # family -> whether its hooks are at work, once that is decided in this process


def register() -> None:
    """SGLang's entry point. Does nothing unless DSA_ENGINE=1, and nothing again in a process where it was called."""
    try:
        ops = enabled_ops(ENGINE)
        if not ops or not tested_version(ENGINE, find("sglang:__version__").value, seams.TESTED):
            return
        creators = find(f"{REGISTRY}:ATTENTION_BACKENDS").value
        override = find(OVERRIDE).value
        check_parameters(OVERRIDE, seams.SIGNATURES[OVERRIDE])
        missing = FAMILIES.keys() - creators.keys()
        if missing:
            raise NotFound(f"{REGISTRY}:ATTENTION_BACKENDS has no {', '.join(sorted(missing))}")
    except (NotFound, ValueError) as error:
        return declined(ENGINE, str(error))
    for name, family in FAMILIES.items():
        if not hasattr(creators[name], "dsa_family"):
            override(name)(_creator(creators[name], family, ops))


def _creator(create: Callable[[Any], Any], family: str, ops: frozenset[str]) -> Callable[[Any], Any]:
    """SGLang's function that makes a backend, with the hooks installed beforehand."""

    @functools.wraps(create)
    def creator(runner: Any) -> Any:
        if family not in _decided:
            _decided[family] = False  # which hooks ask while they are installed
            _decided[family] = _serve(runner, family, ops)
        return create(runner)

    creator.dsa_family = family
    return creator


def _serve(runner: Any, family: str, ops: frozenset[str]) -> bool:
    """Check SGLang, compile the kernels and install the hooks. If anything is missing, log one warning and return
    False."""
    try:
        if reason := backends.why_no_kernels():
            raise layouts.Unsupported(reason)
        if backends.backend() == "reference":
            raise layouts.Unsupported("DSA_BACKEND is reference, and the references are too slow to serve with")
        parallel, speculation = (find(path).value() for path in (PARALLEL, SPECULATION))
        model = MODELS[family](runner, parallel.attn_tp_size, speculation.speculative_num_draft_tokens or 1)
        seams.check(family)
        ops = seams.served(family, ops)
        if not ops:
            raise layouts.Unsupported("topk of DeepSeek-V4 is served together with scores only")
        # With --enable-cp-decode-attn-tp the GPUs that share a prompt's tokens share the heads of all other batches.
        shares = parallel.attn_cp_size if parallel.enable_cp_decode_attn_tp else 1
        for heads in sorted({model.heads, model.heads // shares}):
            warm_up(model._replace(heads=heads), ops, torch.device(runner.device))
        _install(family, ops)
    except Exception as error:  # a plugin must not end the engine, whatever a changed version does
        kind = "" if isinstance(error, NotFound | layouts.Unsupported) else f"{type(error).__name__}: "
        declined(ENGINE, f"{kind}{error}")
        return False
    _logger.info("dsa: %s run on dsa's kernels", ", ".join(sorted(ops)))
    return True


def _install(family: str, ops: frozenset[str]) -> None:
    """Puts the hooks in place. Raises NotFound where SGLang did not put all of them there."""
    registry, kind = find(seams.HOOK_REGISTRY).value, find(seams.HOOK_TYPE).value
    hooks = seams.hooks_of(family, ops)
    added = renamed.add_old_names(hooks)
    before = {path: find(path).value for path in hooks}
    for path, hook in hooks.items():
        registry.register(path.replace(":", "."), _while_serving(hook, family), kind.AROUND)
    registry.apply_hooks()
    if left := [path for path in hooks if find(path).value is before[path]]:
        renamed.remove_old_names(added)
        raise NotFound(f"SGLang's HookRegistry did not replace {', '.join(left)}")


def _while_serving(hook: Callable[..., Any], family: str) -> Callable[..., Any]:
    """The hook, which leaves everything to the function that it replaces unless all hooks are there."""

    @functools.wraps(hook)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs) if _decided[family] else original(*args, **kwargs)

    return around
