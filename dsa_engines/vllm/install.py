"""When the plugin acts: in each worker, once its GPU and its model's configuration are known and before the model is
built, and only if everything that the plugin needs is there. Else vLLM stays as it is."""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

from dsa_engines.replacements import NotFound, Replacements, check_parameters, find
from dsa_engines.switch import declined, tested_version
from dsa_engines.vllm import models, seams, warm_up

ENGINE = "vllm"
HOOK = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
BACKEND = "dsa_engines.vllm.backend.DSASparseBackend"
_logger = logging.getLogger("vllm.dsa")  # below vLLM's own, so that it is shown as that is
_installed = contextlib.ExitStack()  # what undoes it
_on_dsa: set[str] = set()  # the ops that are in place
_engines_own: list[str] = []  # why a model with an indexer runs on vLLM's kernels in this process, which stay


def hook(ops: frozenset[str]) -> None:
    """Lets the workers of this process call `install` when they have their GPU; once, however often it is called."""
    import vllm

    if not tested_version(ENGINE, vllm.__version__, seams.TESTED):
        return
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
    """Puts these ops of a worker's model on dsa's kernels and compiles them, or says in one line why not, with
    everything as it was. Attention alone stays out, in one line, where vLLM's is of another backend. config: vLLM's.
    Returns whether it did.

    What is in place stays: another model of the process may hold graphs and buffers that were made for it. So a second
    model finds the ops of the first, and its kernels are compiled, too; or vLLM's own, if the first was declined.
    Models without an indexer do not count: they call nothing that is replaced.
    """
    first, reason = not _on_dsa, None
    if _engines_own:
        declined(ENGINE, f"an earlier model of this process was declined ({_engines_own[0]})")
        return False
    try:
        reason = models.unsupported(config)
        if reason is None and first:
            if "attention" in ops and (other := models.other_attention(config)):
                _logger.warning("dsa: %s: %s; attention stays the engine's own", ENGINE, other)
                ops -= {"attention"}
            ops = frozenset(filter(_has_seams, ops))
            if not ops:
                return False
            _put(ops, models.calls_of(config))
            _on_dsa.update(ops)
        if reason is None:
            warm_up.warm_up(models.calls_of(config), frozenset(_on_dsa))
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


def _has_seams(part: str) -> bool:
    try:
        seams.check(part)
    except NotFound as error:
        _logger.warning("dsa: %s: %s; %s stays the engine's own", ENGINE, " ".join(str(error).split()), part)
        return False
    return True


def _put(ops: frozenset[str], calls: models.Calls) -> None:
    if ops & {"scores", "select"}:
        # It sets the globals of all that DeepGEMM has, and does nothing once one of them is set.
        find(f"{seams.DEEP_GEMM}:_lazy_init").value()
    replaced = Replacements()
    _installed.callback(replaced.undo)
    replaced.put(seams.replacements(ops, calls))
    if "attention" in ops:
        backend = find(f"{seams.REGISTRY}:AttentionBackendEnum").value.FLASHMLA_SPARSE
        chosen = find(f"{seams.SELECTOR}:_cached_get_attn_backend").value
        if backend.is_overridden():
            raise NotFound(f"FLASHMLA_SPARSE is {backend.get_path()} already")
        find(f"{seams.REGISTRY}:register_backend").value(backend, BACKEND)
        # Backends are looked up once; whatever was looked up before would stay.
        _installed.callback(chosen.cache_clear)
        _installed.callback(backend.clear_override)
        chosen.cache_clear()
