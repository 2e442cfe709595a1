"""The identity of a program: a digest of what was traced, and of nothing else.

The canonical form is the jaxpr, written out equation by equation: primitives, parameters,
types, and constants by content; variables by number. Names of functions, source lines and
derivative rules, which are used up when a program is lowered, are left out.

Why not the lowered module: it has to be lowered first, which a hit in the store does not
need otherwise. Hashing each form of a step, in percent of the time of its trace (jax 0.10,
one training step with RAdam, traced in a context of its own; `benchmarks/handles.py`):

    |                                      | MLP | 40-layer MLP |
    |--------------------------------------|-----|--------------|
    | this form                            |  4  |  7           |
    | the jaxpr as JAX prints it, which    |  7  | 15           |
    | leaves constants out                 |     |              |
    | the lowered module, as bytecode      | 44  | 35           |
    | the lowered module, as text          | 46  | 41           |

A parameter of a kind that is not known here is not guessed at: the digest of the lowered
module then stands for the program beside its jaxpr.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.extend
import numpy as np
from jax.core import AbstractValue

from nitro._code import IdentityMemo, library_name
from nitro._trees import is_rng_key

# What names a call for people, and rules for derivatives: none of it is lowered.
_CUSTOM: Final = frozenset(
    {
        *("num_consts", "symbolic_zeros", "out_trees"),
        *("jvp_jaxpr_fun", "jvp", "fwd_jaxpr_thunk", "fwd", "bwd"),
    }
)
_NAMED: Final = frozenset({"name"})
_UNLOWERED: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "name"), _NAMED),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), _CUSTOM),
    **dict.fromkeys(("remat2", "checkpoint", "remat"), frozenset({"policy"})),
}
_ATOMS: Final = (types.NoneType, bool, int, float, complex, str, bytes, types.EllipsisType)
_SMALL_BYTES: Final = 32
_CONTEXT: Final = ("compute_type", "threefry_partitionable", "xla_metadata")

_serial: Final = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceDigest:
    """What identifies a trace.

    Attributes:
        text: Hexadecimal; equal traces have equal ones.
        is_lasting: Whether another process would come to the same; not so where the trace
            holds something that counts as itself, such as a callback of the user's.
    """

    text: str
    is_lasting: bool


def digest_trace(jaxpr: Any, lowered: Callable[[], bytes]) -> TraceDigest:
    """Digests a closed jaxpr by all that it computes.

    Args:
        jaxpr: The closed jaxpr.
        lowered: Gives the lowered module without locations; called only where the jaxpr
            holds a parameter of a kind that is not known.
    """
    form = CanonicalForm()
    pieces = [form.jaxpr(jaxpr)]
    if form.has_unknown:
        pieces.append(hashlib.sha256(lowered()).hexdigest())
    return TraceDigest(text=_hash(pieces), is_lasting=form.is_lasting)


class CanonicalForm:
    """Writes jaxprs out so that equal text means equal computation.

    Attributes:
        is_lasting: Whether the text is the same in every process.
        has_unknown: Whether a parameter was left out because its kind is not known.
    """

    def __init__(self) -> None:
        self.is_lasting = True
        self.has_unknown = False
        # By `id`: whatever is in here is held by the jaxpr, which outlives this object.
        self._jaxprs: dict[int, str] = {}
        self._avals: dict[Any, str] = {}
        self._contexts: dict[int, str] = {}

    def jaxpr(self, jaxpr: Any) -> str:
        """The digest of a jaxpr, open or closed."""
        known = self._jaxprs.get(id(jaxpr))
        if known is None:
            known = self._jaxprs[id(jaxpr)] = _hash(self.lines(jaxpr))
        return known

    def lines(self, jaxpr: Any) -> Iterator[str]:
        """A jaxpr line by line: inputs and constants first, an equation each, outputs."""
        opened = getattr(jaxpr, "jaxpr", jaxpr)
        arrays = getattr(jaxpr, "consts", ()) or ()
        numbers: dict[Any, int] = {}
        inputs = [*opened.constvars, *opened.invars]
        for variable in inputs:
            numbers[variable] = len(numbers)
        yield " ".join(self._aval(variable.aval) for variable in inputs)
        yield " ".join(map(self._array, arrays))
        for equation in opened.eqns:
            yield self._equation(equation, numbers)
        yield " ".join(self._operand(variable, numbers) for variable in opened.outvars)

    def _equation(self, equation: Any, numbers: dict[Any, int]) -> str:
        name = equation.primitive.name
        unlowered = _UNLOWERED.get(name, frozenset())
        operands = [self._operand(variable, numbers) for variable in equation.invars]
        parameters = [
            f"{key}={self._value(value)}"
            for key, value in sorted(equation.params.items())
            if key not in unlowered
        ]
        for variable in equation.outvars:
            numbers[variable] = len(numbers)
        results = [self._aval(variable.aval) for variable in equation.outvars]
        context = self._context(equation.ctx)
        return f"{name} {context}{operands} {parameters} {results}"

    def _operand(self, variable: Any, numbers: Mapping[Any, int]) -> str:
        if hasattr(variable, "val"):  # a literal
            return f"{self._value(variable.val)}:{self._aval(variable.aval)}"
        return str(numbers[variable])

    def _context(self, context: Any) -> str:
        known = self._contexts.get(id(context))
        if known is None:
            values = {name: getattr(context, name, None) for name in _CONTEXT}
            mesh = getattr(context, "cur_abstract_mesh", None)
            is_plain = mesh is None or mesh.empty
            known = f"{self._value(values)}{'' if is_plain else mesh}"
            self._contexts[id(context)] = known
        return known

    def _aval(self, aval: Any) -> str:
        known = self._avals.get(aval)
        if known is None:
            weak = "~" if getattr(aval, "weak_type", False) else ""
            sharding = getattr(aval, "sharding", None)
            mesh = getattr(sharding, "mesh", None)
            placed = "" if mesh is None or mesh.empty else repr(sharding)
            space = getattr(aval, "memory_space", "")
            known = f"{type(aval).__name__} {weak}{aval} {placed}{space}"
            self._avals[aval] = known
        return known

    def _array(self, array: Any) -> str:
        key = is_rng_key(array)
        kind = f"{array.dtype}" if key else ""
        host = np.asarray(jax.random.key_data(array) if key else array)
        content = np.ascontiguousarray(host).reshape(-1).view(np.uint8).data if host.size else b""
        is_small = host.nbytes <= _SMALL_BYTES
        digest = bytes(content).hex() if is_small else hashlib.sha256(content).hexdigest()
        return f"array {kind}{host.dtype.name}{host.shape} {digest}"

    def _value(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if type(value) in _ATOMS:
            return repr(value)
        if type(value) in (tuple, list):
            return f"({', '.join(map(self._value, value))})"
        if isinstance(value, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr):
            return self.jaxpr(value)
        if isinstance(value, np.generic | np.ndarray | jax.Array) or _wraps_array(value):
            return self._array(value)
        if type(value).__name__ == "PRNGImpl":
            return f"{value.name} {value.tag}"
        if isinstance(value, tuple):
            return f"{_kind(value)}{self._value(tuple(value))}"
        if isinstance(value, Mapping):
            items = sorted(f"{key!r}: {self._value(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, set | frozenset):
            return f"{{{', '.join(sorted(map(self._value, value)))}}}"
        return self._object(value)

    def _object(self, value: Any) -> str:
        if isinstance(value, type | np.dtype):
            return getattr(value, "__qualname__", str(value))
        if isinstance(value, AbstractValue):
            return self._aval(value)
        if isinstance(value, jax.sharding.Sharding):
            return f"{value!r} on {_device_ids(_ordered_devices(value))}"
        if isinstance(value, jax.sharding.Mesh):
            return f"{value!r} on {_device_ids(() if value.empty else value.devices.flat)}"
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return f"{_kind(value)}{self._value(fields)}"
        if callable(value):
            return self._callable(value)
        if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
            return self._described(value)
        self.has_unknown = True
        return _kind(value)

    def _described(self, value: Any) -> str:
        """One of JAX's own settings: a tree, a layout, a number format."""
        text = repr(value)
        if " at 0x" in text:  # where it lies in memory says nothing
            self.has_unknown = True
            return _kind(value)
        return text

    def _callable(self, value: Any) -> str:
        """A function that runs on the host: a library's by its name, else as itself.

        Two callbacks of one text are not one: each may write into what it closes over.
        """
        if library_name(value):
            return library_name(value)
        if _is_primitive_of_jax(value):
            self.has_unknown = True
            return _kind(value)
        if isinstance(value, functools.partial):
            return f"partial {self._callable(value.func)} {self._bound(value)}"
        self.is_lasting = False
        return f"itself {_token(value)}"

    def _bound(self, value: functools.partial[Any]) -> str:
        arguments = (*value.args, *value.keywords.items())
        return self._value(arguments)


def _hash(pieces: Any) -> str:
    return hashlib.sha256("\n".join(pieces).encode("utf-8", "surrogatepass")).hexdigest()


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _wraps_array(value: Any) -> bool:
    """Whether it is the array of NumPy's that JAX keeps as a constant."""
    return isinstance(getattr(value, "val", None), np.ndarray) and hasattr(value, "dtype")


def _is_primitive_of_jax(value: Any) -> bool:
    """Whether it is one of JAX's own primitives that are objects, made anew by each trace.

    `searchsorted` is one from JAX 0.12 on. What it computes shows in the lowered module.
    """
    kind = type(value)
    is_own = kind.__module__.partition(".")[0] == "jax"
    return is_own and any("HiPrim" in base.__name__ for base in kind.__mro__)


def _device_ids(devices: Any) -> list[int]:
    return [device.id for device in devices]


def _ordered_devices(sharding: Any) -> Any:
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat
    is_placed = mesh is None
    return sorted(sharding.device_set, key=lambda device: device.id) if is_placed else ()


def _token(value: Any) -> str:
    known = _tokens.get(value)
    return known or _tokens.put(value, f"{next(_serial)}")


_tokens: Final = IdentityMemo[str]()
