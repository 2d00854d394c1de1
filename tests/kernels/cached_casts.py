"""What tests of the compile cache share: a cache in front of the FP8 cast's compile function, and a stub kernel."""

import functools
from pathlib import Path
from types import SimpleNamespace

from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels
from dsa.runtime.compile_cache import cached

ORIGINAL = kernels.compile_per_token_cast_to_fp8.__wrapped__
ARGS = kernels.shipped_variants()[0][1]
OTHER_ARGS = kernels.shipped_variants()[-1][1]


def counted(compile_function=ORIGINAL):
    """A new cache in front of the FP8 cast's compile function, and the list of what it then really compiles."""
    compiled = []

    @functools.wraps(ORIGINAL)
    def counting(*args):
        compiled.append(args)
        return compile_function(*args)

    return cached(counting), compiled


class StubKernel:
    """Writes its object file in two halves and looks at the directory in between."""

    def __init__(self, fails_with=None):
        self.ir_module = SimpleNamespace(operation=SimpleNamespace(walk=lambda visit: None))
        self.fails_with = fails_with
        self.seen = None

    def export_to_c(self, object_file_path, function_name):
        with open(object_file_path, "wb") as file:
            file.write(b"first half,")
            file.flush()
            self.seen = [path.suffix for path in Path(object_file_path).resolve().parent.iterdir()]
            if self.fails_with is not None:
                raise self.fails_with
            file.write(b" second half")


def objects(directory):
    return sorted(directory.glob("*.o"))
