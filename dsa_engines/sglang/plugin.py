"""Replace SGLang's functions when SGLang creates an attention backend for a model that dsa serves.

SGLang loads plugins in all of its processes, most of which have no model. So `register` replaces only the functions
that create the attention backends, in SGLang's registry, and adds hooks to the methods that load and apply FP4 experts.
When a backend is created, the GPU, the cache and the model are known, and there are no requests or CUDA graphs yet.
Then the plugin checks SGLang's functions, compiles the kernels, and lets SGLang's HookRegistry install the hooks. They
have the type AROUND, so each hook gets the function that it replaces.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dsa.runtime import backends
from dsa_engines.replacements import NotFound, Replacements, check_parameters, find
from dsa_engines.sglang import layouts, renamed, seams
from dsa_engines.sglang.warm_up import warm_up
from dsa_engines.switch import declined, enabled_ops, is_tested

ENGINE = "sglang"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
OVERRIDE = f"{REGISTRY}:register_attention_backend"
PARALLEL, SPECULATION = (f"sglang.srt.runtime_context:{name}" for name in ("get_parallel", "get_spec"))
# {name in SGLang's registry: attention backend}
FAMILIES = {"dsa": "dsa", "nsa": "dsa", "dsv4": "dsv4"}
MODELS = {"dsa": layouts.v32_model, "dsv4": layouts.v4_model}
_logger = logging.getLogger("dsa")
_decided: dict[str, bool] = {}  # {family: whether dsa serves it}, for the families that this process has used
_hooked: set[str] = set()  # paths of functions with a hook


def register() -> None:
    """Do nothing unless DSA_ENGINE=1. SGLang calls this entry point in each process. Repeated calls change nothing."""
    try:
        ops = enabled_ops(ENGINE)
        if not ops:
            return
        is_known = is_tested(find("sglang:__version__").value, seams.TESTED)
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
            override(name)(_creator(creators[name], family, ops, is_known))
    if "experts" in ops and not _hooked:
        try:
            _check("fp4", "experts", is_known)
            _add_hooks(seams.hooks_of("fp4", ops, is_known))  # SGLang installs them after it has loaded all plugins
            # dsa's GEMM takes the gate projections first. HookRegistry cannot replace a property.
            Replacements().put({seams.UP_FIRST: property(lambda method: not seams.keeps_fp4())})
        except (NotFound, layouts.Unsupported) as error:
            _left("FP4 experts", error)


def _creator(create: Callable[[Any], Any], family: str, ops: frozenset[str], is_known: bool) -> Callable[[Any], Any]:
    """Wrap SGLang's function that creates a backend. Install the hooks before the first backend of a family."""

    @functools.wraps(create)
    def creator(runner: Any) -> Any:
        if family not in _decided:
            _decided[family] = False  # read by hooks that are called during the installation
            _decided[family] = _serve(runner, family, ops, is_known)
        return create(runner)

    creator.dsa_family = family
    return creator


def _serve(runner: Any, family: str, ops: frozenset[str], is_known: bool) -> bool:
    """Check SGLang, compile the kernels and install the hooks. Log what stays SGLang's own. Return whether anything
    runs on dsa."""
    try:
        if reason := backends.why_no_kernels():
            raise layouts.Unsupported(reason)
        if backends.backend() == "reference":
            raise layouts.Unsupported("DSA_BACKEND is reference, and the references are too slow to serve with")
        parallel, speculation = (find(path).value() for path in (PARALLEL, SPECULATION))
        model = MODELS[family](runner, parallel.attn_tp_size, speculation.speculative_num_draft_tokens or 1)
        # With --enable-cp-decode-attn-tp, GPUs that split the tokens of a prompt split the heads in other batches.
        shares = parallel.attn_cp_size if parallel.enable_cp_decode_attn_tp else 1
        models = [model._replace(heads=heads) for heads in sorted({model.heads, model.heads // shares})]
        device = torch.device(runner.device)

        def ready(family: str, models: Sequence[layouts.Model]) -> set[str]:
            of_family = (seams.SEAMS | seams.OF_LAYERS)[family].keys()
            return {op for op in sorted(ops & of_family) if _is_ready(family, op, is_known, models, device)}

        of_backend, of_layers = ready(family, models), ready("layers", ())
        # For a DeepSeek-V4 query with at most top-k keys, SGLang's kernel may write no scores. dsa's top-k reads them.
        if family == "dsv4" and "topk" in of_backend and "scores" not in of_backend:
            of_backend.discard("topk")
            _left("topk", "DeepSeek-V4's is served together with scores only")
        _install(seams.hooks_of(family, of_backend, is_known), family)
        _install(seams.hooks_of("layers", of_layers, is_known), None)
    except Exception as error:  # an error in the plugin must not stop the engine
        declined(ENGINE, _reason(error))
        return False
    if served := sorted(of_backend | of_layers):
        _logger.info("dsa: %s run on dsa's kernels", ", ".join(served))
    return bool(served)


def _is_ready(family: str, op: str, is_known: bool, models: Sequence[layouts.Model], device: torch.device) -> bool:
    """Return whether SGLang has the functions that an op needs and the op's kernels compile. If not, log the reason."""
    try:
        _check(family, op, is_known)
        if family == "layers" and seams.is_deterministic():
            raise layouts.Unsupported("with --enable-deterministic-inference sums must not depend on the batch")
        for model in models:
            warm_up(model, frozenset({op}), device)
    except Exception as error:
        _left(op, error)
        return False
    return True


def _check(family: str, op: str, is_known: bool) -> None:
    seams.check(family, op)
    if not is_known and not seams.COMPARED_AT_FIRST & (seams.SEAMS | seams.OF_LAYERS)[family][op].keys():
        version = find("sglang:__version__").value
        raise layouts.Unsupported(f"version {version} was not tested, and this part is not compared with SGLang's")


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, NotFound | layouts.Unsupported) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def _left(op: str, reason: Exception | str) -> None:
    text = reason if isinstance(reason, str) else _reason(reason)
    _logger.warning("dsa: %s: %s; %s stays the engine's own", ENGINE, " ".join(text.split()), op)


def _install(hooks: Mapping[str, Callable[..., Any]], family: str | None) -> None:
    """Install the hooks that are not installed yet. Raise NotFound if SGLang did not install all of them."""
    added = renamed.add_old_names(hooks)
    before = {path: find(path).value for path in hooks if path not in _hooked}
    _add_hooks({path: _while_serving(hooks[path], family) for path in before})
    find(seams.HOOK_REGISTRY).value.apply_hooks()
    if left := [path for path in before if find(path).value is before[path]]:
        renamed.remove_old_names(added)
        raise NotFound(f"SGLang's HookRegistry did not replace {', '.join(left)}")


def _add_hooks(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Register hooks. SGLang installs them in its next `apply_hooks`."""
    registry, kind = find(seams.HOOK_REGISTRY).value, find(seams.HOOK_TYPE).value
    for path, hook in hooks.items():
        registry.register(path.replace(":", "."), hook, kind.AROUND)
        _hooked.add(path)


def _while_serving(hook: Callable[..., Any], family: str | None) -> Callable[..., Any]:
    """Wrap a hook so that it calls the original function unless dsa serves its family. family None: any family."""

    @functools.wraps(hook)
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        serves = any(_decided.values()) if family is None else _decided[family]
        return hook(original, *args, **kwargs) if serves else original(*args, **kwargs)

    return around
