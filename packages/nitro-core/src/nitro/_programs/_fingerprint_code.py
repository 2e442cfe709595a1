"""What a code object does, apart from how it is laid out, and which names it reaches.

Compiled code is brought to a normal form: operations in order, constants and names by
value, jumps by the number of the operation they go to. Line numbers, file names,
docstrings and the no-ops and fused operations that CPython adds depending on line breaks
are not part of it. Nested code (lambdas, comprehensions, inner functions, class bodies)
is written out in the place where it is built.
"""

from __future__ import annotations

import bisect
import dis
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final, Literal, NamedTuple, cast

from ._fingerprint_values import IdentityMemo, describe, digest_of, encode_atom, framed

# Flags that change what a call does. The others follow from the operations, or say that
# there is a docstring (3.13) or a future import.
_FLAGS: Final = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_SILENT: Final = frozenset({"NOP", "CACHE", "EXTENDED_ARG"})
# 3.13 fuses two neighbours only if they stand on one line.
_FUSED: Final = re.compile("(LOAD_FAST|STORE_FAST)_(LOAD_FAST|STORE_FAST)$")
_DIRECTION: Final = re.compile("(FORWARD|BACKWARD)_(?=IF)")
# 3.12 turns a conditional jump round if it goes backward.
_INVERTED: Final = {
    "POP_JUMP_IF_TRUE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_NOT_NONE": "POP_JUMP_IF_NONE",
}
_UNCONDITIONAL: Final = frozenset(
    {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE"}
)
_ENDS: Final = frozenset({"RETURN_VALUE", "RAISE_VARARGS", "RERAISE"})
# What a class body writes about itself: its text, place and name.
_SELF_DESCRIPTION: Final = frozenset(
    {"__doc__", "__firstlineno__", "__static_attributes__", "__qualname__", "__module__"}
)
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


class Constant(NamedTuple):
    """A literal in the code and the line it stands on."""

    encoded: bytes
    text: str
    line: int


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
    text = _Listing()
    _list_code(code, text)
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


# The normal form --------------------------------------------------------------------------


class _Operation(NamedTuple):
    name: str
    argument: Any  # name of a variable, value of a constant, offset of a jump, or number
    text: str
    line: int
    offset: int
    has_constant: bool = False
    is_jump: bool = False
    is_inverted: bool = False  # it jumps where the operation named would go on


@dataclass
class _Listing:
    operations: list[str] = field(default_factory=list[str])
    lines: list[int] = field(default_factory=list[int])
    constants: list[Constant] = field(default_factory=list[Constant])

    def add(self, text: str, line: int) -> None:
        # A newline inside a name's text cannot happen; the join above relies on it.
        self.operations.append(text)
        self.lines.append(line)


def _list_code(code: CodeType, out: _Listing) -> None:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS)
    count += bool(code.co_flags & inspect.CO_VARKEYWORDS)
    signature = (code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount)
    parameters = code.co_varnames[:count]
    out.add(f"code {code.co_flags & _FLAGS} {signature} {parameters}", code.co_firstlineno)
    flow = _Flow(code)
    for number, index in enumerate(flow.order):
        operation = flow.operations[index]
        if isinstance(operation.argument, CodeType):
            out.add(f"{operation.name} code", operation.line)
            _list_code(operation.argument, out)
        elif operation.has_constant:
            out.add(operation.name, operation.line)
            out.constants.append(_constant(operation))
        else:
            out.add(f"{operation.name} {operation.text}", operation.line)
        for target in flow.departures(number):
            out.add(target, operation.line)
    out.add("end", code.co_firstlineno)


class _Flow:
    """The operations in the order of execution, each path to its end before the next.

    Where CPython puts a block of code, whether it jumps there directly or by way of another
    jump, and in which direction, depends on line breaks; where control goes does not.
    """

    def __init__(self, code: CodeType) -> None:
        self.operations = _operations(code)
        self._offsets = [operation.offset for operation in self.operations]
        # From the back, because such jumps go forward and may form chains.
        for index in reversed(range(len(self.operations))):
            self.operations[index] = self._threaded(self.operations[index])
        self._handlers = self._find_handlers(code)
        self.order = self._find_order()
        self._number = {index: number for number, index in enumerate(self.order)}

    def departures(self, number: int) -> Iterator[str]:
        """Describes where control may go, apart from the operation that follows."""
        index = self.order[number]
        for target in self._branches(index):
            yield f"to {self._number[target]}"
        handler = self._handlers[index]
        if handler is not None:
            yield f"except {self._number[self._skip_jumps(handler[0])]} {handler[1:]}"
        follower = self._follower(index)
        if follower is not None and self._number[follower] != number + 1:
            yield f"goto {self._number[follower]}"

    def _find_order(self) -> list[int]:
        order: dict[int, None] = {}
        waiting = [self._skip_jumps(0)]
        while waiting:
            index: int | None = waiting.pop()
            while index is not None and index not in order:
                order[index] = None
                waiting.extend(self._branches(index))
                handler = self._handlers[index]
                if handler is not None:
                    waiting.append(self._skip_jumps(handler[0]))
                index = self._follower(index)
        return list(order)

    def _branches(self, index: int) -> list[int]:
        operation = self.operations[index]
        if not operation.is_jump:
            return []
        turned = operation.is_inverted
        return [self._skip_jumps(index + 1) if turned else self._target_of(operation)]

    def _follower(self, index: int) -> int | None:
        operation = self.operations[index]
        if operation.name in _ENDS:
            return None
        turned = operation.is_inverted
        return self._target_of(operation) if turned else self._skip_jumps(index + 1)

    def _target_of(self, jump: _Operation) -> int:
        return self._skip_jumps(self._at(jump.argument))

    def _threaded(self, operation: _Operation) -> _Operation:
        """Leads `a and (b or c)` to where 3.11 may or may not have led it already."""
        own, other = ("FALSE", "TRUE") if "FALSE" in operation.name else ("TRUE", "FALSE")
        if operation.name != f"JUMP_IF_{own}_OR_POP":
            return operation
        reached = self._target_of(operation)
        target = self.operations[reached]
        if target.name == operation.name:
            return operation._replace(argument=target.argument)
        if target.name != f"JUMP_IF_{other}_OR_POP":
            return operation
        return operation._replace(
            name="POP_JUMP_IF_FALSE",
            argument=self.operations[reached + 1].offset,
            is_inverted=own == "TRUE",
        )

    def _skip_jumps(self, index: int) -> int:
        seen: set[int] = set()
        # `while True: pass` jumps to itself.
        while self.operations[index].name in _UNCONDITIONAL and index not in seen:
            seen.add(index)
            index = self._at(self.operations[index].argument)
        return index

    def _at(self, offset: int) -> int:
        return bisect.bisect_left(self._offsets, offset)

    def _find_handlers(self, code: CodeType) -> list[tuple[int, int, bool] | None]:
        """Gives each operation what catches its exceptions: where, stack depth, `lasti`."""
        handlers: list[tuple[int, int, bool] | None] = [None] * len(self.operations)
        for entry in cast("Iterable[Any]", getattr(dis.Bytecode(code), "exception_entries", ())):
            for index in range(self._at(entry.start), self._at(entry.end)):
                handlers[index] = (self._at(entry.target), entry.depth, entry.lasti)
        return handlers


def _operations(code: CodeType) -> list[_Operation]:
    """Decodes a code object, without what depends on its layout only."""
    found: list[_Operation] = []
    for instruction in dis.get_instructions(code):
        for operation in _split(instruction, code):
            describes = operation.name == "STORE_NAME" and operation.argument in _SELF_DESCRIPTION
            if describes and (found[-1].has_constant or found[-1].argument == "__name__"):
                found.pop()
            elif operation.name not in _SILENT:
                found.append(operation)
    return found


def _split(instruction: dis.Instruction, code: CodeType) -> Iterator[_Operation]:
    position = instruction.positions
    line = (position and position.lineno) or code.co_firstlineno
    name, argument = instruction.opname, instruction.argval
    fused = _FUSED.match(name)
    if fused:
        for part, variable in zip(fused.groups(), argument, strict=True):
            yield _Operation(part, variable, variable, line, instruction.offset)
        return
    has_constant = instruction.opcode in dis.hasconst
    if has_constant and instruction.arg is not None:
        # `dis` knows the value for some operations only: not for KW_NAMES of 3.11.
        argument = code.co_consts[instruction.arg]
    is_jump = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
    if name == "RETURN_CONST":
        name = "LOAD_CONST"
    number = "" if instruction.arg is None else str(instruction.arg)
    named = _names_something(instruction.opcode)
    text = "" if is_jump else instruction.argrepr if named else number
    name = _DIRECTION.sub("", name)
    yield _Operation(
        name=_INVERTED.get(name, name),
        argument=argument,
        text=text,
        line=line,
        offset=instruction.offset,
        has_constant=has_constant,
        is_jump=is_jump,
        is_inverted=name in _INVERTED,
    )
    if instruction.opname == "RETURN_CONST":
        yield _Operation("RETURN_VALUE", None, "", line, instruction.offset)


def _names_something(opcode: int) -> bool:
    return opcode in dis.hasname or opcode in dis.haslocal or opcode in dis.hasfree


def _constant(operation: _Operation) -> Constant:
    value = operation.argument
    return Constant(_encode_constant(value), describe(value), operation.line)


def _encode_constant(value: object) -> bytes:
    if isinstance(value, tuple):
        items = [_encode_constant(item) for item in cast("tuple[object, ...]", value)]
        return b"tuple:" + framed(*items)
    if isinstance(value, frozenset):
        items = sorted(_encode_constant(item) for item in cast("frozenset[object]", value))
        return b"frozenset:" + framed(*items)
    return encode_atom(value)


# The names --------------------------------------------------------------------------------

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
    operations = _operations(code)
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


def _note(operation: _Operation, out: _Names) -> None:
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
    code: CodeType, operations: list[_Operation], known: dict[str, set[Reference]]
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


def _is_local_store(operation: _Operation, code: CodeType) -> bool:
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
    def read(cls, operations: list[_Operation], index: int) -> _Import:
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
    code: CodeType, operations: list[_Operation], index: int, known: _Aliases
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


def _is_update(operations: list[_Operation], index: int) -> bool:
    for pattern in _COUNTING:
        window = operations[index : index + len(pattern)]
        names = [operation.name for operation in window]
        if len(names) < len(pattern) or not all(map(str.startswith, names, pattern)):
            continue
        in_place = any(op.name == "BINARY_OP" and op.argument >= 13 for op in window)
        same = window[-1].name == "STORE_SUBSCR" or window[-1].argument == window[0].argument
        return in_place and same
    return False
