"""Digests of many entries in a process that sees one state of the project: each source is looked up, read and parsed
once, not once for every entry that has it."""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

from dsa import source_digest
from tests.gpu import named_modules


@contextlib.contextmanager
def read_once() -> Iterator[Callable[[], None]]:
    """Digests inside take every source as they found it first, until what this yields is called: it forgets all."""
    path_of, imports = map(functools.cache, (source_digest._path_of, source_digest._imports))
    by_path = (path_of, imports, source_digest._tree, source_digest._module_text, source_digest.modules_used_by)
    by_path += (named_modules.modules_named_by,)

    def forget() -> None:
        for function in by_path:
            function.cache_clear()

    collects = gc.isenabled()
    with contextlib.ExitStack() as stack:
        for name, value in (("_path_of", path_of), ("_imports", imports)):
            stack.callback(setattr, source_digest, name, getattr(source_digest, name))
            setattr(source_digest, name, value)
        # Syntax trees stay: looking for garbage among them takes longer than all else, also when the process ends.
        gc.disable()
        if collects:
            stack.callback(gc.enable)
        stack.callback(gc.freeze)
        forget()
        stack.callback(forget)
        yield forget
