"""Digests of many entries in a process that sees one state of the project: each source is looked up, read and parsed
once, not once for every entry that has it."""

import ast
import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterator

from dsa import source_digest
from tests.gpu import named_modules, receipt


@contextlib.contextmanager
def read_once() -> Iterator[Callable[[], None]]:
    """Digests inside take every source as they found it first, until what this yields is called: it forgets all."""
    path_of, imports = map(functools.cache, (source_digest._path_of, source_digest._imports))
    # By the text, which is the same in a copy of the project: not to be forgotten inside.
    parse, walk = functools.cache(ast.parse), functools.cache(lambda tree: tuple(ast.walk(tree)))
    parts = types.SimpleNamespace(parse=parse, walk=walk, Constant=ast.Constant)
    by_path = (path_of, imports, source_digest._tree, source_digest._module_text, source_digest.modules_used_by)
    by_path += (named_modules.modules_named_by,)

    def forget() -> None:
        for function in by_path:
            function.cache_clear()

    collects = gc.isenabled()
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (source_digest, "_path_of", path_of),
            (source_digest, "_imports", imports),
            (receipt, "ast", parts),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        # Syntax trees stay: looking for garbage among them takes longer than all else.
        gc.disable()
        if collects:
            stack.callback(gc.enable)
        forget()
        stack.callback(forget)
        yield forget
