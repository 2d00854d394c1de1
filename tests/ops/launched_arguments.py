"""Compare the arguments that ops pass to kernels with the fake arguments for which kernels are compiled. No GPU is
needed.

The comparison covers the number of arguments, which of them are None, and the dtypes and dimensions of tensors. A
launch with a difference would raise an error on a GPU. The module also checks that a repeated call, whose steps are
recorded, launches the same kernels with the same arguments as the first call. And it describes all launches, including
the contents of memory that an op prepares for a kernel (`contents_of`).

python -m tests.ops.launched_arguments prints the differences and the launches as JSON. It replaces the compiler in its
process, so tests run it in a subprocess (`launched`).
"""

import contextlib
import functools
import hashlib
import json
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import dsa
from dsa.cases import CASES
from dsa.cases.case import Case, Maker
from dsa.cute.fake_tensors import cute_dtype
from dsa.runtime import backends, compile_cache
from dsa.runtime.checks import dtype_name
from dsa.runtime.op import OPS, forget_calls
from dsa.runtime.recorded_calls import REPEATS
from tests.kernels import machine_code
from tests.project_copy import ROOT

ARCH = "sm_90"


@functools.cache
def launched() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.ops.launched_arguments"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def differences(arguments: Sequence[Any], fakes: Sequence[Any]) -> Iterator[str]:
    """Yield the differences between a launch's arguments and the kernel's fake arguments. The last fake argument is the
    stream, which launches do not pass."""
    expected = fakes[:-1]
    if len(arguments) != len(expected):
        yield f"{len(arguments)} arguments for {len(expected)}"
        return
    for i, (given, fake) in enumerate(zip(arguments, expected)):
        if (given is None) != (fake is None):
            yield f"argument {i}: {'None' if given is None else type(given).__name__} for {fake}"
        elif isinstance(given, torch.Tensor):
            shape = getattr(fake, "shape", None)
            if shape is None or len(shape) != given.dim():
                yield f"argument {i}: shape {list(given.shape)} for {shape}"
            elif fake.element_type.width != 8 * given.element_size() or not _same_type(given.dtype, fake.element_type):
                yield f"argument {i}: {given.dtype} for {fake.element_type}"
            else:
                fixed = [(n, m) for n, m in zip(given.shape, shape) if isinstance(m, int)]
                if any(n != m for n, m in fixed):
                    yield f"argument {i}: shape {list(given.shape)} for {shape}"


def _same_type(dtype: torch.dtype, element_type: Any) -> bool:
    try:
        return cute_dtype(dtype_name(dtype)) is element_type
    except KeyError:  # a dtype that only some kernels accept
        return str(element_type).lower() == dtype_name(dtype)


def larger_calls() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    """Yield (name, function that makes arguments, function that runs the op on them) for calls that CASES lacks. They
    have gradients, or numbers of rows, tokens, queries or keys for which the ops run other kernels."""
    make = Maker("cpu")

    def product(rows: int) -> Any:
        return (make.e4m3(rows, 128), make.positive(rows, 1)), (make.e4m3(136, 128), make.positive(2, 1))

    def columns(rows: int) -> Any:
        w, ws = make.e4m3(136, 1024), make.positive(2, 8)
        return (make.e4m3(rows, 512), make.positive(rows, 4)), (w[:, 512:], ws[:, 4:])

    def grouped(op: str, count: int) -> Any:
        b = make.e4m3(2, 256, 128), make.positive(2, 2, 1)
        if "fp4" in op:
            packed = torch.zeros(2, 256, 64, dtype=torch.int8)
            scale = torch.full((2, 256, 4), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
            b = packed, scale, dsa.fp4_block_scales(packed, scale)
        return (make.e4m3(count, 128), make.positive(count, 1)), b, make.ints([count // 2, count])

    for rows in (1, 600, 5000):
        for operands in (product, columns):
            run = partial(operands, rows), lambda given: dsa.fp8_gemm_nt(*given)
            yield f"fp8_gemm_nt of {rows} rows, {operands.__name__}", *run
    # With so many rows, the cast of SwiGLU's result to FP8 needs more than one wave of CTAs and runs another kernel.
    swiglu = partial(grouped, "grouped_fp8_fp4_gemm_swiglu", 26000)
    yield "grouped_fp8_fp4_gemm_swiglu", swiglu, lambda given: dsa.grouped_fp8_fp4_gemm_swiglu(*given, limit=2.0)
    for op in ("grouped_fp8_gemm_nt", "grouped_fp8_gemm_swiglu", "grouped_fp8_fp4_gemm_nt"):
        for rows in (40, 600, 3000):
            of_rows, ones = torch.arange(rows, dtype=torch.int32), torch.ones(rows)
            options = {"": {}, "gathered ": {"rows": of_rows}} | (
                {} if "swiglu" in op else {"weighted ": {"weights": ones}}
            )
            for kind, own in options.items():
                run = partial(lambda op, own, given: getattr(dsa, op)(*given, **own), op, own)
                yield f"{op} of {rows} {kind}rows", partial(grouped, op, rows), run
    for tokens in (1, 300, 3000):
        streams = partial(lambda tokens: (make.bf16(tokens, 4, 64), make.bf16(3, 24, 256)), tokens)
        yield f"hyper_mix of {tokens} tokens", streams, lambda given: dsa.hyper_mix(*given)
    for tokens in (1, 60):
        operands = partial(lambda tokens: (make.bf16(tokens, 2048), make.bf16(600, 2048)), tokens)
        yield f"linear_fp32 of {tokens} tokens", operands, lambda given: dsa.linear_fp32(*given, 0.5, scaled_from=500)
    for tokens in (8, 300):
        of_tokens = partial(
            lambda tokens: (
                *(make.bf16(tokens, 64), make.bf16(tokens, 4, 64), make.f32(tokens, 4), make.f32(tokens, 4, 4)),
                make.bf16(3, 24, 256),
            ),
            tokens,
        )
        yield f"hyper_expand_mix of {tokens} tokens", of_tokens, lambda given: dsa.hyper_expand_mix(*given)
    router = partial(lambda tokens: (make.bf16(tokens, 64), make.bf16(40, 64), make.f32(40), 3), 50)
    yield "route_to_experts of 50 tokens", router, lambda given: dsa.route_to_experts(*given)

    def selected(queries: int, heads: int, keys: int) -> Any:
        indices = torch.zeros(queries, 1, keys, dtype=torch.int32)
        return torch.zeros(queries, heads, 576, dtype=torch.bfloat16), make.bf16(64, 1, 576), indices

    # With 4096 queries of 8 heads, the op tries groups of adjacent queries that share keys.
    for queries, heads, keys in ((3, 64, 128), (3, 128, 128), (4096, 8, 1024)):
        run = partial(selected, queries, heads, keys), lambda given: dsa.flash_mla_sparse_fwd(*given, 0.04)
        yield f"flash_mla_sparse_fwd of {queries} queries, {heads} heads", *run

    def decoded() -> Any:
        q, cache, indices = selected(1, 64, 4096)
        return q[None], cache.view(1, 64, 1, 576), None, None, 512, None, None, None, False, False, indices

    yield "flash_mla_with_kvcache of a long list", decoded, lambda given: dsa.flash_mla_with_kvcache(*given)

    def narrow() -> Any:
        indices = make.ints([[[0, 3, -1]], [[4, 1, 2]], [[5, -1, -1]]])
        return make.bf16(3, 2, 160), make.bf16(6, 1, 160), indices

    def narrow_cache() -> Any:
        q, keys, indices = narrow()
        return q[:, None], keys.view(2, 3, 1, 160), None, None, 128, None, None, None, False, False, indices

    yield "flash_mla_sparse_fwd of narrow keys", narrow, lambda given: dsa.flash_mla_sparse_fwd(*given, 0.04, 128)
    yield "flash_mla_with_kvcache of narrow keys", narrow_cache, lambda given: dsa.flash_mla_with_kvcache(*given)
    for call in CASES:
        if call.op in GRADIENTS:
            yield f"{call.name} and gradients", call.arguments, partial(_gradients, call)
        if call.op == "sparse_mla_attention":
            fixed_order = partial(lambda call: call.arguments() | {"deterministic": True}, call)
            yield f"{call.name} and deterministic gradients", fixed_order, partial(_gradients, call)


_INDEXER = ("q_idx", "k_idx", "w_idx")
# Ops with kernels for gradients, and the arguments whose gradients the kernels compute.
GRADIENTS = {
    "indexer_warmup_attention": _INDEXER,
    "rms_norm": ("x", "weight"),
    "sparse_indexer_loss": _INDEXER,
    "sparse_mla_attention": ("q", "kv"),
}


def _gradients(call: Case, given: dict[str, Any]) -> object:
    """Return the gradients of the sum of a call's differentiable results, for the arguments in GRADIENTS."""
    inputs = [given[name].requires_grad_() for name in GRADIENTS[call.op]]
    results = [x.float().sum() for x in call.run(given) if x.requires_grad]
    return torch.autograd.grad(sum(results), inputs)


_BYTES = torch.int8, torch.uint8


class Memory:
    """Number storages in the order in which they are first seen. Calls that use memory in the same way get equal
    numbers, although the addresses differ."""

    def __init__(self, contents: bool = False) -> None:
        self._seen: list[tuple[torch.UntypedStorage, int]] = []
        self._contents = contents

    def described(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            what = tuple(x.shape), x.stride(), x.dtype, self._place(x)
            return (*what, contents_of(x)) if self._contents else what
        if isinstance(x, dict):
            return self.described([x[name] for name in sorted(x)])
        return tuple(map(self.described, x)) if isinstance(x, list | tuple) else x

    def _place(self, x: torch.Tensor) -> tuple[int, int] | None:
        """Return (number of the storage, offset from the first tensor seen in it). An empty storage has no address:
        return None."""
        storage = x.untyped_storage()
        if not storage.nbytes():
            return None
        for i, (other, offset) in enumerate(self._seen):
            if storage.data_ptr() == other.data_ptr():
                return i, x.storage_offset() - offset
        self._seen.append((storage, x.storage_offset()))
        return len(self._seen) - 1, 0


def contents_of(x: torch.Tensor) -> str:
    """Describe what a tensor contains when a kernel gets it. Integers get a digest. Other tensors get "none" (no
    elements), "zeros", "nothing" (only the values that `fill_uninitialized_memory` writes), or "numbers". Bytes get no
    digest, because quantised values differ between CPUs."""
    if not x.numel():
        return "none"
    if not x.dtype.is_floating_point and x.dtype not in _BYTES:
        return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:8]
    numbers = x.detach().float()
    nothing = numbers == torch.iinfo(x.dtype).max if x.dtype in _BYTES else numbers.isnan()
    return "nothing" if nothing.all() else "numbers" if numbers.any() else "zeros"


def main() -> None:
    """Print {"differences": lines, "recorded": names of the calls that were recorded, "launches": {op: [launches of
    each call]}} as JSON."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    warnings.filterwarnings("ignore", message=".*deterministic")
    launched, memory = [], [Memory()]
    found, name, recorded, variant = [], [""], [], [""]
    launches = defaultdict(list)

    def compile_for(target: str, kernel: Any, *fakes: Any) -> Callable[..., None]:
        own = variant[0]

        def launch(*arguments: Any) -> None:
            launched.append((own, repr(memory[0].described(arguments))))
            found.extend(f"{name[0]}: {type(kernel).__name__}: {x}" for x in differences(arguments, fakes))

        return launch

    def load_or_compile(function: Callable[..., Any], arguments: tuple) -> Any:
        variant[0] = machine_code.name_of(function, arguments)
        return function(*arguments)

    compile_cache.compile_for = compile_for
    compile_cache._load_or_compile = load_or_compile
    backends.runs_kernel = lambda *_: True
    backends.arch_of = lambda _: ARCH
    backends.on_device = lambda _: contextlib.nullcontext()
    calls = [(call.name, call.arguments, call.run) for call in CASES]
    for name[0], arguments, run in (*calls, *larger_calls()):
        forget_calls()
        # No kernel runs, so results are uninitialised. An op that uses them as indices may raise IndexError.
        with contextlib.suppress(IndexError):
            given, memory[0] = arguments(), Memory(contents=True)
            launched.clear()
            memory[0].described(given)
            run(given)
        launches[name[0].split()[0]].append(list(launched))
        forget_calls()
        with contextlib.suppress(IndexError):
            each = []
            for _ in range(REPEATS + 2):
                given, memory[0] = arguments(), Memory()  # making arguments can launch kernels, too
                launched.clear()
                memory[0].described(given)
                each.append((memory[0].described(run(given)), tuple(launched)))
            recorded += [name[0]] if any(op.known.steps for op in OPS.values()) else []
            found.extend(f"{name[0]}: call {i + 1} differs" for i, other in enumerate(each) if other != each[0])
    print(json.dumps({"differences": [*dict.fromkeys(found)], "recorded": recorded, "launches": launches}))


if __name__ == "__main__":
    main()
