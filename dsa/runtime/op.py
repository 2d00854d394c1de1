"""Declaration of ops. The eager path, PyTorch's custom op and its fake are derived from one declaration.

    @op(arguments=RMS_NORM, reference=reference.rms_norm, results=_results, limits={"rows": at_most(MAX_ROWS)})
    def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        from dsa.kernels.elementwise import rms_norm_sm90 as kernel

        out = _results(x)
        ...  # kernel.compile_rms_norm(...)(x, weight, out, eps)
        return out

The decorated function, called the launch, launches Hopper's kernels. It imports the kernels itself, so that `import
dsa` imports no compiler. Its arguments are checked before the call. `@_rms_norm.on("sm_100")` decorates the function
that launches the kernels of another arch. `out` declares outputs that a caller may pass: the launch takes them as last
arguments, with None for outputs that it should allocate, and returns them before its other results.
`_rms_norm.into(*arguments, out)` writes to given outputs and returns the other results. The parameters of the launch
are all arguments of the op in the order of their specs, in one flat list, as PyTorch's custom ops require. `reference`,
`results` and `rule` have only the parameters that they need. Users call a separate public function (`rms_norm`), which
has the keyword arguments, their defaults and the docstring.

A call of the op
- runs the reference, which is plain PyTorch, if the op is `differentiable`, grad mode is on, and an argument requires a
  gradient;
- under torch.compile is one node of the graph, `torch.ops.dsa.NAME`, whose fake calls `arguments.check` and `results`;
- otherwise runs the kernels or the reference: dsa.runtime.backends decides by the tensors' device and the op's archs.

If an op's kernels have a backward pass, it is declared as `gradient`. An eager call that runs kernels in grad mode is
then a torch.autograd.Function, and the same backward pass is registered with torch for `torch.ops.dsa.NAME`. The
backward pass runs another op, which has no gradient, so a second backward pass raises an error.

Checks and the Python code of a launch take longer than launching the kernel, and decoding repeats the same calls. So
the op remembers the signature of a valid call, and records a call that repeats often as a list of steps
(`recorded_calls`). Guards in C++ find these steps in later calls (`call_guards`). Therefore a launch must depend only
on the signature of the arguments. An op whose launch depends on more is declared with `recorded=False`.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import library

from dsa.runtime import backends
from dsa.runtime.arguments import Accepted, Arguments, Tensor
from dsa.runtime.checks import check_memory, check_updatable
from dsa.runtime.recorded_calls import REPEATS, KnownCalls, first_shape, is_recording, record, signature

OPS: dict[str, "Op"] = {}
HOPPER = "sm_90"
Launch = Callable[..., Any]


class Gradient(NamedTuple):
    """An op's backward pass.

    save      save(ctx, arguments, results) runs after the forward pass and keeps on ctx what the backward pass needs
    backward  backward(ctx, run, *gradients) returns a gradient or None for each argument. `gradients` are the gradients
              of the results, None for a result that the loss does not depend on. run(op, *arguments) runs the op that
              computes the gradients; the first of `arguments` must be a tensor
    """

    save: Callable[..., None]
    backward: Callable[..., tuple[torch.Tensor | None, ...]]


class Op:
    """A declared op, to be called with all of its arguments in their order.

    into  the same op with the declared outputs (`out`) as additional last arguments: it writes to them and returns the
          other results. An op without declared outputs has no `into`
    """

    into: "Op"

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        reference: Callable[..., Any],
        results: Callable[..., Any] | None,
        limits: Mapping[str, Accepted],
        rule: Callable[..., None] | None,
        differentiable: bool,
        gradient: Gradient | None,
        recorded: bool,
        dtypes: tuple[torch.dtype, ...],
        public: str,
    ) -> None:
        """Unlike in `op`, `reference`, `results` and `rule` take all arguments in order."""
        self.name, self.arguments, self.public = name, arguments, public
        self.reference, self.results = reference, results
        self.limits, self.rule = arguments.limits_of(f"limits of {name}", limits), rule
        self.differentiable, self.gradient, self.recorded, self.dtypes = differentiable, gradient, recorded, dtypes
        self._with_gradient = None if gradient is None else _autograd_function(self).apply
        self.launches: dict[str, Launch] = {}
        self.known = KnownCalls()
        places = {argument: i for i, argument in enumerate(arguments.specs)}
        self._written = tuple(places[argument] for argument in arguments.written)
        # An output may be the input that its spec names in `like`. The limits of kernels can differ in this case, so
        # the signature contains whether output and input begin at the same address.
        like = ((argument, arguments.specs[argument].like) for argument in arguments.written)
        self._in_place = tuple((places[argument], places[other]) for argument, other in like if other)

    def on(self, arch: str) -> Callable[[Launch], Launch]:
        """Return a decorator for the function that launches the kernels for an arch, such as "sm_100"."""

        def keep(launch: Launch) -> Launch:
            into: Op | None = getattr(self, "into", None)
            names, accepted = [*inspect.signature(launch).parameters], [*(into or self).arguments.specs]
            if names != accepted:
                raise TypeError(f"{launch.__name__}: must take {', '.join(accepted)}, got {', '.join(names)}")
            if into is None:
                self._keep(arch, launch)
            else:
                outputs = len(accepted) - len(self.arguments.specs)
                self._keep(arch, _with_none(launch, outputs))
                into._keep(arch, lambda *given: _rest(launch(*given), outputs))
            return launch

        return keep

    def _keep(self, arch: str, launch: Launch) -> None:
        self.launches[arch] = launch
        archs = backends.ARCHS.setdefault(self.public, [])
        archs += [] if arch in archs else [arch]

    def __call__(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and self.known.guarded and backends.allows_kernels():
            for like, steps in self.known.guarded.get(first_shape(arguments), ()):
                if like(*arguments):
                    return steps(*arguments)
        if self.differentiable and torch.is_grad_enabled() and wants_gradient(*arguments):
            return self._run_reference(arguments)
        if torch.compiler.is_compiling():
            self.arguments.check_types(*arguments)
            return getattr(torch.ops.dsa, self.name)(*arguments)
        return self.run(*arguments)

    def run(self, *arguments: Any) -> Any:
        """Run the kernels or the reference. `__call__` and torch (`torch.ops.dsa.NAME`) call this. In grad mode, an op
        with `gradient` runs its kernels in an autograd function."""
        tensor, call = _first_tensor(arguments), None
        if self._lacks_dtype(tensor):
            self.arguments.check(*arguments)
            backends.note_reference_only(f"{self.public} in {str(tensor.dtype).removeprefix('torch.')}", tensor)
            return self._run_reference(arguments)
        if self.known.steps and not is_recording():
            call = self._signature(arguments)
            steps = self.known.steps.get(call)
            if steps is not None and backends.allows_kernels():
                self.known.add_guard(call, steps, arguments, self._in_place)
                with backends.on_device(tensor):
                    return steps(*arguments)
        if tensor is None or not self.runs_kernel(tensor):
            return self._run_reference(arguments)
        call = self._signature(arguments) if call is None else call
        self._check_for_kernels(call, arguments)
        launch = self._launch_for(tensor.device)
        if self._with_gradient is not None and torch.is_grad_enabled():
            launch = self._with_gradient
        with backends.on_device(tensor):
            if not self.recorded or is_recording() or self.known.count(call) != REPEATS:
                return launch(*arguments)
            try:
                result, steps = record(launch, arguments)
            except BaseException:
                self.known.recount(call)
                raise
            if steps is not None:
                self.known.keep(call, steps)
            return result

    def _run_reference(self, arguments: tuple[Any, ...]) -> Any:
        self.arguments.check(*arguments)
        named = [
            (f"{name}[0]", x[0]) if isinstance(x, list) and x else (name, x)
            for name, x in zip(self.arguments.names, arguments)
        ]
        for name, x in [(name, x) for name, x in named if isinstance(x, torch.Tensor)][:1]:
            check_memory(name, x)
        for i in self._written:
            if isinstance(arguments[i], torch.Tensor):
                check_updatable(self.arguments.names[i], arguments[i])
        return self.reference(*arguments)

    def runs_kernel(self, tensor: torch.Tensor) -> bool:
        """Whether this op runs kernels for this tensor. Only the archs of this op count, not those of other parts of
        the public function."""
        return backends.runs_kernel(self.public, tensor, self.launches)

    def check(self, *arguments: Any) -> None:
        """Raise the errors that a call with these arguments would raise before the launch."""
        tensor = _first_tensor(arguments)
        plain = tensor is None or torch.compiler.is_compiling() or self._lacks_dtype(tensor)
        if plain or not self.runs_kernel(tensor):
            self.arguments.check(*arguments)
        else:
            self._check_for_kernels(self._signature(arguments), arguments)

    def launch_on(self, device: torch.device, *arguments: Any) -> Any:
        """Launch the kernels on this device without checks, for another op that has checked the arguments."""
        return self._launch_for(device)(*arguments)

    def _launch_for(self, device: torch.device) -> Launch:
        arch = backends.arch_of(device)
        if arch not in self.launches:
            raise ValueError(f"{self.public}: has no {arch} kernel, only those for {', '.join(self.launches)}")
        return self.launches[arch]

    def _lacks_dtype(self, tensor: torch.Tensor | None) -> bool:
        return bool(self.dtypes) and tensor is not None and tensor.dtype not in self.dtypes

    def _check_for_kernels(self, call: tuple, arguments: tuple[Any, ...]) -> None:
        """Check the arguments, unless a call with this signature has passed. call: the arguments' signature"""
        if call not in self.known:
            self._check_all(arguments)
            self.known.remember(call)

    def _signature(self, arguments: tuple[Any, ...]) -> tuple:
        call = signature(*arguments)
        if not self._written:
            return call
        return (
            *call,
            torch.is_grad_enabled(),
            *(getattr(arguments[i], "requires_grad", None) for i in self._written),
            *(_begin_together(arguments[i], arguments[other]) for i, other in self._in_place),
        )

    def _check_all(self, arguments: tuple[Any, ...]) -> None:
        sizes = self.arguments.check(*arguments)
        try:
            for argument, accepted, word, size in self.limits.broken(sizes):
                what = "" if word == argument else f" for {word}"
                raise ValueError(f"{argument}: the kernel takes {accepted}{what}, got {size}")
            if self.rule is not None:
                self.rule(*arguments)
        except ValueError as error:
            archs = " and ".join(self.launches)
            raise ValueError(f"{error} (kernels for {archs})") from None
        self.arguments.check_layouts(*arguments)

    def register(self, signature: inspect.Signature) -> None:
        def prototype() -> None:
            """Serve as the function whose signature infer_schema reads."""

        prototype.__signature__ = signature
        schema = library.infer_schema(prototype, mutates_args=self.arguments.written)
        name, written = f"dsa::{self.name}", self.arguments.written
        library.custom_op(name, self.run, mutates_args=written, schema=schema)

        def fake(*arguments: Any) -> Any:
            self.arguments.check(*arguments)
            return None if self.results is None else self.results(*arguments)

        library.register_fake(name, fake)
        if self.gradient is not None:
            library.register_autograd(name, self._backward, setup_context=self._setup_context)

    def _setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        self.gradient.save(ctx, inputs, output)

    def _backward(self, ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return self.gradient.backward(ctx, _torch_op, *gradients)


def _autograd_function(op: Op) -> type[torch.autograd.Function]:
    """Return an autograd function that launches the kernels directly, in less host time than through torch's
    dispatcher."""
    save, differentiate = op.gradient

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = _launch(op, *arguments)
        ctx.set_materialize_grads(False)
        save(ctx, arguments, results)
        return results

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # In grad mode the caller asks for gradients of gradients: torch's dispatcher then raises an error in the second
        # backward pass.
        return differentiate(ctx, _torch_op if torch.is_grad_enabled() else _launch, *gradients)

    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(op.name, (torch.autograd.Function,), functions)


def _launch(op: Op, *arguments: Any) -> Any:
    return op.launch_on(arguments[0].device, *arguments)


def _torch_op(op: Op, *arguments: Any) -> Any:
    return getattr(torch.ops.dsa, op.name)(*arguments)


def op(
    *,
    arguments: Arguments,
    reference: Callable[..., Any],
    results: Callable[..., Any] | None = None,
    limits: Mapping[str, Accepted] | None = None,
    rule: Callable[..., None] | None = None,
    out: Mapping[str, Tensor] | None = None,
    differentiable: bool = False,
    gradient: Gradient | None = None,
    recorded: bool = True,
    dtypes: tuple[torch.dtype, ...] = (),
    public: str = "",
) -> Callable[[Launch], Op]:
    """Declare the op NAME by the function `_NAME`, which launches its kernels for Hopper.

    `reference`, `results` and `rule` get the arguments that their parameters name. Raises TypeError if one of these
    parameters is not an argument, or if the parameters of the launch are not all arguments and outputs in their order.

    arguments       specs of the arguments
    reference       a function in PyTorch that computes the same results
    results         allocates the results, also for meta tensors. None for an op that writes to its arguments and
                    returns nothing
    limits          limits of the kernels for sizes and numbers, within what the specs allow (`dsa.runtime.arguments`)
    rule            raises ValueError for arguments that the kernels do not accept, if limits cannot express the reason
    out             specs of the first results, if a caller may pass tensors for them (`Op.into`). The launch takes
                    these tensors after the arguments, None if it should allocate them. The op with these outputs is
                    registered as NAME_out
    differentiable  whether the reference runs if a gradient is wanted and the caller gives no output
    gradient        the kernels' backward pass. If an eager call runs the reference, autograd differentiates the
                    reference
    recorded        whether repeated calls are recorded. False if the launch depends on more than the signature of its
                    arguments, such as on torch's settings
    dtypes          the dtypes that the kernels accept for the first tensor, if its spec allows more. With other dtypes
                    the reference runs, with a warning if the GPU has kernels
    public          the name of the public function that the op is a part of, if it is not NAME; errors and warnings use
                    it
    """
    if results is None and not arguments.written:
        raise TypeError("results: must be given for an op that returns something, got None")
    outputs = dict(out or {})

    def declare(launch: Launch) -> Op:
        name = launch.__name__.removeprefix("_")
        found = arguments.taking(f"reference of {name}", reference)
        made = None if results is None else arguments.taking(f"results of {name}", results)
        every = arguments.writing(outputs) if outputs else arguments
        check = None if rule is None else every.taking(f"rule of {name}", rule)
        options = recorded, dtypes, public or name
        of_call = found, made, limits or {}, _with_none(check, len(outputs)), differentiable, gradient
        declared = Op(name, arguments, *of_call, *options)
        signature = inspect.signature(launch)
        if outputs:
            declared.into = Op(
                f"{name}_out", every, *_writing(found, made, [*outputs]), limits or {}, check, False, None, *options
            )
        declared.on(HOPPER)(launch)
        OPS[name] = declared
        kept = [signature.parameters[argument] for argument in arguments.specs]
        declared.register(signature.replace(parameters=kept))
        if outputs:
            OPS[f"{name}_out"] = declared.into
            rest = _rest(typing.get_args(signature.return_annotation) or (signature.return_annotation,), len(outputs))
            given = [signature.parameters[name].replace(annotation=torch.Tensor) for name in outputs]
            returns = tuple[*rest] if type(rest) is tuple else rest
            declared.into.register(signature.replace(parameters=[*kept, *given], return_annotation=returns))
        return declared

    return declare


def _with_none(function: Callable[..., Any] | None, count: int) -> Callable[..., Any] | None:
    if function is None or not count:
        return function
    nothing = (None,) * count
    return lambda *arguments: function(*arguments, *nothing)


def _writing(
    reference: Callable[..., Any], results: Callable[..., Any], names: Sequence[str]
) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Return (reference, results) for `Op.into`."""
    count = len(names)

    def write(*given: Any) -> Any:
        arguments, outputs = given[:-count], given[-count:]
        for name, output in zip(names, outputs):
            check_updatable(name, output)
        with torch.no_grad():  # as with kernels: `output` must not become a part of a graph
            found = reference(*arguments)
            for output, values in zip(outputs, found if isinstance(found, tuple) else (found,)):
                output.copy_(values)
        return _rest(found, count)

    return write, lambda *given: _rest(results(*given[:-count]), count)


def _rest(results: Any, count: int) -> Any:
    rest = results[count:] if isinstance(results, tuple) else ()
    return rest if len(rest) > 1 else rest[0] if rest else None


def forget_calls() -> None:
    """Forget the known and recorded calls of all ops. Call this after a change of anything else that launches depend
    on."""
    for each in OPS.values():
        each.known.forget()


def wants_gradient(*arguments: Any) -> bool:
    """Whether a tensor in the arguments requires a gradient."""
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in _flat(arguments))


def _begin_together(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    try:
        return x.data_ptr() == y.data_ptr()
    except RuntimeError:  # a sparse or nested tensor, which the checks refuse
        return False


def _first_tensor(arguments: tuple[Any, ...]) -> torch.Tensor | None:
    first = arguments[0] if arguments else None
    if isinstance(first, torch.Tensor):
        return first
    return next((x for x in _flat(arguments) if isinstance(x, torch.Tensor)), None)


def _flat(arguments: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for x in arguments:
        found.extend(x) if isinstance(x, (list, tuple)) else found.append(x)
    return found
