"""What every loader has to know of an artifact, kept beside its programs as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ._dims import constraint_symbols, size_symbols
from ._documents import Document, is_size
from ._io_spec import IOSpec
from ._requests import RequestReader

if TYPE_CHECKING:
    from ._program import ExportProgram


@dataclass(frozen=True, kw_only=True)
class ArtifactIndex:
    """The shared part of what a backend writes beside its programs; derive your own from it.

    Attributes:
        name: The artifact's name.
        inputs: The inputs in wire order, which is argument order.
        outputs: The outputs in result order.
        batch_sizes: The sizes that have a program of their own, ascending.
        rtol: How far outputs may be from the golden ones, relative to the largest.
        dynamic_batch: Whether there is a program for any number of rows.
        batch_symbol: What the constraints call the number of rows.
        constraints: What holds for the sizes that a caller chooses.
        narrowed: The 64-bit inputs whose values must fit 32 bits.
    """

    spec_type: ClassVar[type[IOSpec]] = IOSpec

    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    batch_sizes: tuple[int, ...]
    rtol: float
    dynamic_batch: bool = False
    batch_symbol: str = "b"
    constraints: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()

    @classmethod
    def fields_of(cls, program: ExportProgram) -> dict[str, Any]:
        """The shared fields, for a program that is written.

        Raises:
            ExportError: A dtype that the backend's specs do not have; names the tensor.
        """
        return {
            "name": program.name,
            "inputs": tuple(cls.spec_type.from_export(spec) for spec in program.inputs),
            "outputs": tuple(cls.spec_type.from_export(spec) for spec in program.outputs),
            "batch_sizes": program.batch_sizes,
            "rtol": program.rtol,
            "dynamic_batch": program.dynamic_batch,
            "batch_symbol": program.batch_symbol,
            "constraints": program.constraints,
            "narrowed": program.narrowed,
        }

    @classmethod
    def from_program(cls, program: ExportProgram, **own: Any) -> Self:
        """The index of a program that is written; `own` are the fields of a derived class."""
        return cls(**cls.fields_of(program), **own)

    @classmethod
    def read_fields(cls, document: Document) -> dict[str, Any]:
        """The shared fields out of a document, checked.

        Raises:
            BundleError: A key that is missing or breaks a rule; names it.
        """
        return {
            "name": document.read("name", str),
            "inputs": cls.read_specs(document, "inputs"),
            "outputs": cls.read_specs(document, "outputs"),
            "batch_sizes": _read_batch_sizes(document),
            "rtol": _read_rtol(document),
            "dynamic_batch": document.read("dynamic_batch", bool),
            "batch_symbol": _read_symbol(document, "batch_symbol"),
            # Artifacts of the first releases have no such keys.
            "constraints": document.read_list("constraints", str, []),
            "narrowed": document.read_list("narrowed", str, []),
        }

    @classmethod
    def from_json(cls, values: Any, *, file: str, **own: Any) -> Self:
        """Reads what `to_json` gave; `own` are the fields of a derived class.

        Raises:
            BundleError: A key that is missing or breaks a rule; names it.
        """
        document = Document(values, file=file)
        index = cls(**cls.read_fields(document), **own)
        index.check_symbols(document)
        return index

    @classmethod
    def read_specs(cls, document: Document, key: str) -> tuple[Any, ...]:
        """The specs in a list of objects.

        Raises:
            BundleError: An entry that breaks a rule; names the key.
        """
        specs = tuple(cls.spec_type.read(entry) for entry in document.children(key))
        if len({spec.name for spec in specs}) != len(specs):
            document.refuse(key, "a list with one name twice", "distinct names")
        return specs

    def to_json(self) -> dict[str, Any]:
        """The shared fields as JSON values."""
        return {
            "name": self.name,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "batch_sizes": list(self.batch_sizes),
            "rtol": self.rtol,
            "dynamic_batch": self.dynamic_batch,
            "batch_symbol": self.batch_symbol,
            "constraints": list(self.constraints),
            "narrowed": list(self.narrowed),
        }

    def make_reader(self, *, array_types: tuple[type, ...] = ()) -> RequestReader:
        """What checks the requests; `array_types` as for `RequestReader`."""
        return RequestReader(
            self.inputs,
            batch_symbol=self.batch_symbol,
            constraints=self.constraints,
            narrowed=self.narrowed,
            array_types=array_types,
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that a caller chooses, besides the rows; sorted."""
        sizes = (size for spec in self.inputs for size in spec.symbolic_sizes)
        return tuple(sorted(size_symbols(*sizes) - {self.batch_symbol}))

    def check_symbols(self, document: Document) -> None:
        """Checks that shapes, constraints and `narrowed` speak of names that are there.

        Raises:
            BundleError: A name out of nowhere; names the key.
        """
        symbols = set(self.symbols)
        known = symbols | {self.batch_symbol}
        for i, constraint in enumerate(self.constraints):
            try:
                unknown = constraint_symbols(constraint) - known
            except ValueError as error:
                document.refuse(f"constraints[{i}]", repr(constraint), f"a constraint: {error}")
            if unknown:
                document.refuse(
                    f"constraints[{i}]", repr(constraint), f"names out of {sorted(known)}"
                )
        for key, specs in (("inputs", self.inputs), ("outputs", self.outputs)):
            for i, spec in enumerate(specs):
                if size_symbols(*spec.symbolic_sizes) - symbols:
                    document.refuse(
                        f"{key}[{i}].shape", repr(spec.shape), f"names out of {sorted(symbols)}"
                    )
        names = [spec.name for spec in self.inputs]
        for i, name in enumerate(self.narrowed):
            if name not in names:
                document.refuse(f"narrowed[{i}]", repr(name), f"an input out of {names}")


def _read_batch_sizes(document: Document) -> tuple[int, ...]:
    sizes = document.read("batch_sizes", list)
    whole = all(is_size(size, least=1) for size in sizes)
    if not sizes or not whole or sizes != sorted(set(sizes)):
        document.refuse("batch_sizes", repr(sizes), "distinct sizes above 0, ascending")
    return tuple(sizes)


def _read_rtol(document: Document) -> float:
    rtol = document.read("rtol", float)
    if not 0 <= rtol < 1:
        document.refuse("rtol", repr(rtol), "a number from 0 to 1")
    return float(rtol)


def _read_symbol(document: Document, key: str) -> str:
    name = document.read(key, str, "b")
    if not name.isidentifier():
        document.refuse(key, repr(name), "a name")
    return name
