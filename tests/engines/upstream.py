"""The pieces of docs/upstream, as modules."""

import importlib.util

from tests.project_copy import ROOT


def piece(engine, name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "upstream" / engine / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
