"""What a code object does: its normal form, and which names it reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Final, Literal, NamedTuple

from ._fingerprint_bytecode import Constant, Listing, Operation, decode, list_code
from ._fingerprint_values import IdentityMemo, digest_of, framed

_GLOBAL_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELL_LOADS: Final = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_LOCAL_LOADS: Final = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK"})
_ATTRIBUTE_LOADS: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
# Functions that take a name as text: of an attribute, a global, a module.
_ATTRIBUTES_BY_TEXT: Final = frozenset({"getattr", "hasattr", "attrgetter", "methodcaller"})
_GLOBALS_BY_TEXT: Final = "globals"
_MODULES_BY_TEXT: Final = frozenset({"import_module", "__import__"})

Scope = Literal["global", "closure", "import"]


class Reference(NamedTuple):
    """A name that code reads, with the attributes it takes from it one after another.

    Attributes:
        scope: Where the name is looked up.
        name: The name; for an import the module, with leading dots where it is relative.
        attributes: `("sub", "SCALE")` for `name.sub.SCALE`.
        is_updated: The code only adds to it in place (`calls += 1`), so that what it holds
            reaches nothing but itself.
    """

    scope: Scope
    name: str
    attributes: tuple[str, ...] = ()
    is_updated: bool = False


@dataclass(frozen=True)
class CodeFacts:
    """The normal form of one function's code.

    Attributes:
        digest: Hash of the operations and the constants.
        operations: One text per operation, with the constants left blank.
        lines: The line of each operation.
        constants: The literals, in the order in which the code loads them.
        references: The names that it reads from outside.
        attributes: Every attribute name that it reads of anything, sorted.
        uses_super: Whether it looks attributes up beyond its own class.
    """

    digest: bytes
    operations: tuple[str, ...]
    lines: tuple[int, ...]
    constants: tuple[Constant, ...]
    references: tuple[Reference, ...]
    attributes: tuple[str, ...]
    uses_super: bool


_facts: Final = IdentityMemo[CodeFacts]()


def code_facts(code: CodeType) -> CodeFacts:
    """Returns the normal form of a code object, computed once for each."""
    return _facts.get(code) or _facts.put(code, _compute_facts(code))


def _compute_facts(code: CodeType) -> CodeFacts:
    text = Listing()
    list_code(code, text)
    names = _Names()
    _find_names(code, {}, names)
    _read_texts(names)
    constants = [framed(constant.encoded) for constant in text.constants]
    return CodeFacts(
        digest=digest_of("\n".join(text.operations).encode(), b"".join(constants)),
        operations=tuple(text.operations),
        lines=tuple(text.lines),
        constants=tuple(text.constants),
        references=tuple(dict.fromkeys(names.references)),
        attributes=tuple(sorted(names.attributes)),
        uses_super=names.uses_super,
    )


_Aliases = Mapping[str, set[Reference]]


@dataclass
class _Names:
    references: list[Reference] = field(default_factory=list[Reference])
    attributes: set[str] = field(default_factory=set[str])
    texts: set[str] = field(default_factory=set[str])
    loaded: set[str] = field(default_factory=set[str])
    uses_super: bool = False


def _find_names(code: CodeType, outer: _Aliases, out: _Names) -> None:
    """Collects the names that a code object and the code nested in it read.

    `outer` holds what the free variables stand for, where the enclosing code gave them
    a module or another name from outside.
    """
    operations = decode(code)
    known: dict[str, set[Reference]] = {name: set() for name in code.co_cellvars}
    known.update((name, outer[name]) for name in code.co_freevars if name in outer)
    # Twice, because a loop may use an alias above the line that sets it.
    _follow_chains(code, operations, known)
    out.references.extend(_follow_chains(code, operations, known))
    for operation in operations:
        _note(operation, out)
    for operation in operations:
        if isinstance(operation.argument, CodeType):
            _find_names(operation.argument, known, out)


def _note(operation: Operation, out: _Names) -> None:
    name = operation.argument
    if operation.name in _ATTRIBUTE_LOADS:
        out.attributes.add(name)
    out.uses_super |= operation.name == "LOAD_SUPER_ATTR"
    out.uses_super |= operation.name in _GLOBAL_LOADS and name == "super"
    if isinstance(name, str):
        out.loaded.add(name)
        if operation.has_constant and all(map(str.isidentifier, name.split("."))):
            out.texts.add(name)


def _read_texts(names: _Names) -> None:
    """Takes a literal for a name if the code also has a function that looks names up."""
    if names.loaded & _ATTRIBUTES_BY_TEXT:
        names.attributes.update(part for text in names.texts for part in text.split("."))
    if _GLOBALS_BY_TEXT in names.loaded:
        names.references.extend(Reference("global", text) for text in sorted(names.texts))
    if names.loaded & _MODULES_BY_TEXT:
        names.references.extend(Reference("import", text) for text in sorted(names.texts))


def _follow_chains(
    code: CodeType, operations: list[Operation], known: dict[str, set[Reference]]
) -> list[Reference]:
    """Reads `a.b.c` off the operations: a load, then the attributes right behind it.

    A chain that is stored in a local variable goes on where the variable is read. One that
    ends in anything else (an argument, a container, an attribute of a class body) is
    reported as it is: whatever the name stands for then counts as a whole.
    """
    found: list[Reference] = []
    chains: set[Reference] = set()
    imported = _Import("", is_from=False)
    is_importing = False
    for index, operation in enumerate(operations):
        if chains and operation.name in ("LOAD_ATTR", "LOAD_METHOD"):
            chains = {_longer(chain, operation.argument) for chain in chains}
            continue
        if is_importing and operation.name in ("SWAP", "POP_TOP"):
            continue  # `import a.b.c as d` walks down from `a`
        is_importing = operation.name in ("IMPORT_NAME", "IMPORT_FROM")
        if operation.name == "IMPORT_FROM":
            chains = {imported.member(operation.argument)}
            continue
        if chains and _is_local_store(operation, code):
            known.setdefault(operation.argument, set()).update(chains)
        else:
            found.extend(sorted(chains))
        if operation.name == "IMPORT_NAME":
            imported = _Import.read(operations, index)
            chains = set() if imported.is_from else {imported.reference}
        else:
            chains = _start(code, operations, index, known)
    return found


def _is_local_store(operation: Operation, code: CodeType) -> bool:
    if operation.name == "STORE_DEREF":
        return operation.argument in code.co_cellvars
    return operation.name == "STORE_FAST"


def _longer(chain: Reference, attribute: str) -> Reference:
    return chain._replace(attributes=(*chain.attributes, attribute))


class _Import:
    """The `import` statement being executed, which may bind several names."""

    def __init__(self, module: str, *, is_from: bool) -> None:
        self.is_from = is_from
        self.reference = Reference("import", module)

    @classmethod
    def read(cls, operations: list[Operation], index: int) -> _Import:
        """Reads the statement whose `IMPORT_NAME` stands at `index`."""
        level, names = (operation.argument for operation in operations[index - 2 : index])
        module = "." * level + operations[index].argument
        is_from = names is not None
        return cls(module if is_from else module.partition(".")[0], is_from=is_from)

    def member(self, name: str) -> Reference:
        """Returns what `IMPORT_FROM` puts on the stack."""
        reached = _longer(self.reference, name)
        if not self.is_from:
            self.reference = reached
        return reached


def _start(
    code: CodeType, operations: list[Operation], index: int, known: _Aliases
) -> set[Reference]:
    operation = operations[index]
    name = operation.argument
    if operation.name in _LOCAL_LOADS:
        # 3.13 loads a cell this way only to hand it to nested code, looked at by itself.
        is_cell = name in code.co_cellvars or name in code.co_freevars
        return set() if is_cell else set(known.get(name, ()))
    if operation.name in _GLOBAL_LOADS:
        return {Reference("global", name, (), _is_update(operations, index))}
    if operation.name in _CELL_LOADS and name in known:
        return set(known[name])
    if operation.name in _CELL_LOADS:
        return {Reference("closure", name, (), _is_update(operations, index))}
    return set()


# `n += 1` and `n["key"] += 1`, as compiled by 3.11 to 3.13.
_COUNTING: Final = (
    ("LOAD_", "LOAD_", "BINARY_OP", "STORE_GLOBAL"),
    ("LOAD_", "LOAD_", "BINARY_OP", "STORE_DEREF"),
    (
        *("LOAD_", "LOAD_", "COPY", "COPY", "BINARY_SUBSCR", "LOAD_"),
        *("BINARY_OP", "SWAP", "SWAP", "STORE_SUBSCR"),
    ),
)


def _is_update(operations: list[Operation], index: int) -> bool:
    for pattern in _COUNTING:
        window = operations[index : index + len(pattern)]
        names = [operation.name for operation in window]
        if len(names) < len(pattern) or not all(map(str.startswith, names, pattern)):
            continue
        in_place = any(op.name == "BINARY_OP" and op.argument >= 13 for op in window)
        same = window[-1].name == "STORE_SUBSCR" or window[-1].argument == window[0].argument
        return in_place and same
    return False
