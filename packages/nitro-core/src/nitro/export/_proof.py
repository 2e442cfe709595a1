"""Runs a symbolic program at several sizes, large ones too, against the hooks at each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from nitro._programs import jaxprs, matmul_flops
from nitro.errors import ExportError

from ._advice import NOTHING_HELPS, largest_working, propose
from ._difference import describe_difference
from ._golden import make_inputs
from ._program import ExportProgram
from ._request import local_platform
from ._shapes import ShapeProbe, describe_sizes
from ._wire import WireForward

_NUM_PROVED = 3

_MAX_FLOPS = 5e10
_MAX_ELEMENTS = 2**24
"""What one run at a large size may take: some seconds, and 64 MiB for an array of floats."""

_BY_POSITION = frozenset({"gather", "dynamic_slice", "scatter", "scatter-add"})
"""What may read or write behind the end of an array, where JAX raises nothing."""

Sizes = Mapping[str, int]


def prove_symbolic(forward: WireForward, program: ExportProgram, probe: ShapeProbe) -> None:
    """Runs the symbolic program at several sizes, against the hooks traced at those.

    Raises:
        ExportError: It fails where the same hooks work at that size, gives other values, or
            outputs that are not finite where those of smaller sizes are.
    """
    if probe.symbols and local_platform() in program.platforms:
        _Proof(forward, program, probe).run()


class _Proof:
    """The symbolic program of an export, called at sizes of choice."""

    def __init__(self, forward: WireForward, program: ExportProgram, probe: ShapeProbe) -> None:
        self._forward = forward
        self._program = program
        self._probe = probe
        batch = None if program.dynamic_batch else program.batch_sizes[0]
        self._exported = program.exported(batch, platforms=[local_platform()])
        self._weights = [jnp.asarray(program.weights[name]) for name in program.weight_names]
        self._usually_infinite = frozenset[str]()

    def run(self) -> None:
        """Small sizes first: which outputs are finite there decides what large ones must be."""
        small = self._probe.assignments()[:_NUM_PROVED]
        infinite = set[str]()
        for values in small:
            got, problem = self._compare(values)
            if problem:
                raise self._refusal(values, problem, _say_equal())
            infinite |= {name for name, array in got.items() if _count_lost(array)}
        self._usually_infinite = frozenset(infinite)
        for symbol in self._probe.symbols:
            for values in self._large(symbol):
                problem = self._problem(values)
                if problem:
                    raise self._refusal(values, problem, self._advise(symbol, values, small[0]))

    def _compare(self, values: Sizes) -> tuple[dict[str, np.ndarray], str]:
        """What the symbolic program gives, and how that differs from the hooks' own outputs."""
        program = self._program
        rows = values.get(program.batch_symbol, program.batch_sizes[0])
        wire = make_inputs(program.inputs, rows, values)
        try:
            with self._forward.wide_types():
                arguments = [*(wire[spec.name] for spec in program.inputs), *self._weights]
                results = self._exported.call(*arguments)
                wanted = jax.jit(program.fn)(*arguments)
                pairs = [
                    (np.asarray(a), np.asarray(b)) for a, b in zip(results, wanted, strict=True)
                ]
        # XLA raises several types for a module that it cannot refine to these sizes.
        except Exception as error:
            raise ExportError(
                f"The symbolic program of `{self._forward.owner}` fails where "
                f"{describe_sizes(values)}: {str(error).splitlines()[0]}",
                expected="it to run at every size that the export promises",
                fix='promise the sizes that work with `constraints=`, or write them as "2*k"',
            ) from error
        got = {spec.name: a for spec, (a, _) in zip(program.outputs, pairs, strict=True)}
        for spec, (a, b) in zip(program.outputs, pairs, strict=True):
            problem = describe_difference(a, b, program.rtol)
            if problem:
                return got, f"The output `{spec.name}` of the symbolic program {problem}"
        return got, ""

    def _problem(self, values: Sizes) -> str:
        """What is wrong at a large size; empty where nothing is."""
        got, problem = self._compare(values)
        for name, array in got.items():
            lost = _count_lost(array)
            if lost and name not in self._usually_infinite:
                told = f"{lost:,} of {array.size:,} values are infinite or NaN"
                return problem or f"The output `{name}` is not finite: {told}"
        return problem

    def _large(self, symbol: str) -> Iterator[Sizes]:
        """The largest size of a symbol that a run can afford."""
        for values in self._probe.enlarge(symbol):
            jaxpr = self._probe.jaxpr(self._rows(values), values)
            opened = [inner.jaxpr for inner in jaxprs(jaxpr)]
            used = {equation.primitive.name for inner in opened for equation in inner.eqns}
            # Rows are treated one by one, as each batch size shows; unless one looks up its number.
            if symbol == self._program.batch_symbol and not used & _BY_POSITION:
                return
            sizes = (v.aval.size for inner in opened for e in inner.eqns for v in e.outvars)
            is_small = max(sizes, default=0) <= _MAX_ELEMENTS
            if is_small and matmul_flops(jaxpr) <= _MAX_FLOPS:
                yield values
                return

    def _rows(self, values: Sizes) -> int:
        return values.get(self._program.batch_symbol, self._program.batch_sizes[0])

    def _advise(self, symbol: str, failing: Sizes, small: Sizes) -> str:
        """The largest size of a symbol that works, as a constraint that was tried."""

        def works(size: int) -> bool:
            values = {**failing, symbol: size}
            return not self._probe.works(values) or not self._problem(values)

        good = small[symbol]
        if not works(good):
            return NOTHING_HELPS
        constraint = f"{symbol} <= {largest_working(works, good, failing[symbol])}"
        if self._probe.problem_with((constraint,)) is not None:
            return NOTHING_HELPS
        return propose((*self._probe.constraints, constraint))

    def _refusal(self, values: Sizes, problem: str, fix: str) -> ExportError:
        problem, _, told = problem.partition(": ")
        return ExportError(
            f"{problem} where {describe_sizes(values)}{': ' + told if told else ''}.",
            expected="what the same hooks give when they are traced at that size, and finite where "
            "smaller sizes are",
            fix=fix,
        )


def _say_equal() -> str:
    return "test no size with `==` in a hook: JAX takes it as False where the size is symbolic"


def _count_lost(array: np.ndarray) -> int:
    """How many elements are infinite or NaN."""
    is_exact = array.dtype.kind in "biu"
    return 0 if is_exact else int(np.count_nonzero(~np.isfinite(array.astype(np.float64))))
