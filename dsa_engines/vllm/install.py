"""Installation of the plugin in each worker, after its GPU is set and before the model is built."""

import contextlib
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any

from dsa_engines.replacements import NotFound, Replacements, check_parameters, find
from dsa_engines.switch import declined, is_tested
from dsa_engines.vllm import models, same_results, seams, warm_up

ENGINE = "vllm"
HOOK = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
BACKEND = "dsa_engines.vllm.backend.DSASparseBackend"
_logger = logging.getLogger("vllm.dsa")  # below vLLM's own, so that it is shown as that is
_installed = contextlib.ExitStack()  # callbacks that undo the installation
_on_dsa: set[str] = set()  # the ops that are in place
_engines_own: list[str] = []  # why a model with an indexer runs on vLLM's kernels in this process, which stay


def hook(ops: frozenset[str]) -> None:
    """Let the workers of this process call `install` when they have their GPU. Repeated calls change nothing."""
    try:
        check_parameters(HOOK, seams.SIGNATURES[HOOK])
    except NotFound as error:
        declined(ENGINE, str(error))
        return
    owner, name, init_device = find(HOOK)
    if not hasattr(init_device, "dsa_ops"):
        setattr(owner, name, _then_install(init_device, ops))


def _then_install(init_device: Callable[[Any], None], ops: frozenset[str]) -> Callable[[Any], None]:
    @functools.wraps(init_device)
    def with_dsa(self: Any) -> None:
        init_device(self)
        install(self.vllm_config, ops)

    with_dsa.dsa_ops = ops
    return with_dsa


def install(config: Any, ops: frozenset[str]) -> bool:
    """Put these parts of a worker's model on dsa's kernels, and compile these. Return whether that was done.

    A part stays vLLM's own, with a line in the log, if vLLM lacks its functions, if its kernels do not compile, or if
    attention is of another backend. With a version of vLLM that was not tested, it also stays if its results differ
    from those of vLLM's kernels (`same_results`). In any other case of failure everything stays as it was.

    The parts of the first model in a process stay, because its graphs and buffers were made for them. A second model
    gets the same parts. If the first model was declined, so are later ones; models without an indexer do not count.
    config: vLLM's.
    """
    first, reason = not _on_dsa, None
    if _engines_own:
        declined(ENGINE, f"an earlier model of this process was declined ({_engines_own[0]})")
        return False
    try:
        reason = models.unsupported(config)
        if reason is None:
            calls = models.calls_of(config)
            if first:
                is_known = is_tested(find("vllm:__version__").value, seams.TESTED)
                ops = _possible(config, ops, calls, is_known)
                if not ops:
                    return False
                _put(ops, calls, is_known)
                _on_dsa.update(ops)
            elif failing := warm_up.failing(calls, frozenset(_on_dsa)):
                reason = "; ".join(failing.values())
    except Exception as error:  # whatever it is, the engine has to start as if the plugin were not there
        reason = str(error) if isinstance(error, NotFound) else f"{type(error).__name__}: {error}"
    if reason is not None and first:
        uninstall()
        if models.selects_keys(config):  # other models call nothing that is replaced
            _engines_own.append(reason)
        declined(ENGINE, reason)
    elif reason is not None:
        reason = " ".join(reason.split())
        _logger.warning(
            "dsa: %s: %s; an earlier model of this process runs on dsa's kernels, which stay", ENGINE, reason
        )
    else:
        _logger.info("dsa: %s run on dsa's kernels", ", ".join(sorted(_on_dsa)))
    return reason is None


def uninstall() -> None:
    """vLLM as it was."""
    _on_dsa.clear()
    _engines_own.clear()
    _installed.close()


def _possible(config: Any, ops: frozenset[str], calls: models.Calls, is_known: bool) -> frozenset[str]:
    """Compile the parts, and return those that can be put in place. Log why the others cannot."""
    reasons = {}
    for part in sorted(ops):
        try:
            if part == "attention" and (other := models.other_attention(config)):
                raise NotFound(other)
            if part == "select" and (reason := models.writes_scores(config, ops)):
                raise NotFound(reason)
            if part == "routing" and "experts" not in ops:
                raise NotFound("DSA_ENGINE_OPS has no experts, which read what the router sorts")
            seams.check(part)
            if not is_known:
                _set_deep_gemm({part})
                same_results.check(part, calls)
        except NotFound as error:
            reasons[part] = " ".join(str(error).split())
    if left := ops - reasons.keys():
        reasons |= warm_up.failing(calls, left)
    for part, reason in reasons.items():
        _logger.warning("dsa: %s: %s; %s stays the engine's own", ENGINE, reason, part)
    return ops - reasons.keys()


def _set_deep_gemm(ops: Collection[str]) -> None:
    """Let vLLM look up DeepGEMM's functions, if a part replaces some. vLLM looks none up once one of them is set."""
    if {"scores", "select"} & set(ops):
        find(f"{seams.DEEP_GEMM}:_lazy_init").value()


def _put(ops: frozenset[str], calls: models.Calls, is_known: bool) -> None:
    _set_deep_gemm(ops)
    replaced = Replacements()
    _installed.callback(replaced.undo)
    replaced.put(seams.replacements(ops, calls, is_known))
    if "attention" in ops:
        backend = find(f"{seams.REGISTRY}:AttentionBackendEnum").value.FLASHMLA_SPARSE
        chosen = find(f"{seams.SELECTOR}:_cached_get_attn_backend").value
        find(f"{seams.REGISTRY}:register_backend").value(backend, BACKEND)
        # Backends are looked up once; whatever was looked up before would stay.
        _installed.callback(chosen.cache_clear)
        _installed.callback(backend.clear_override)
        chosen.cache_clear()
