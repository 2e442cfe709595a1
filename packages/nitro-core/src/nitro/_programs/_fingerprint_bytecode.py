"""Bytecode in a normal form, the same however the source is laid out.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Final, NamedTuple, cast

from ._fingerprint_values import describe, encode_atom, framed

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
# PUSH_NULL and LOAD_METHOD prepare a call. CPython chooses between them by whether the name in
# front of the dot is imported at the top of what is compiled: a file, a cell, or one method.
_SILENT: Final = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "PUSH_NULL"})
_METHOD_LOADS: Final = {"LOAD_METHOD": "LOAD_ATTR"}
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


class Constant(NamedTuple):
    """A literal in the code and the line it stands on."""

    encoded: bytes
    text: str
    line: int


class Operation(NamedTuple):
    """One operation, decoded.

    Attributes:
        name: CPython's name of it, without the direction of a jump.
        argument: The name of a variable, the value of a constant, the offset of a jump, or a
            number.
        text: The argument for the listing; empty for a jump.
        line: The line that it stands on.
        offset: Where it stands in the code.
        has_constant: Whether it loads a constant.
        is_jump: Whether it may jump.
        is_inverted: Whether it jumps where the operation named would go on.
    """

    name: str
    argument: Any
    text: str
    line: int
    offset: int
    has_constant: bool = False
    is_jump: bool = False
    is_inverted: bool = False


@dataclass
class Listing:
    """The normal form of some code: a text and a line per operation, and the constants."""

    operations: list[str] = field(default_factory=list[str])
    lines: list[int] = field(default_factory=list[int])
    constants: list[Constant] = field(default_factory=list[Constant])

    def add(self, text: str, line: int) -> None:
        """Adds an operation; its text has no newline, which a digest of all texts relies on."""
        self.operations.append(text)
        self.lines.append(line)


def list_code(code: CodeType, out: Listing) -> None:
    """Writes out a code object and the code nested in it, in the order of execution."""
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
            list_code(operation.argument, out)
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
        self.operations = decode(code)
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

    def _target_of(self, jump: Operation) -> int:
        return self._skip_jumps(self._at(jump.argument))

    def _threaded(self, operation: Operation) -> Operation:
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


def decode(code: CodeType) -> list[Operation]:
    """Decodes a code object, without what depends on its layout only."""
    found: list[Operation] = []
    for instruction in dis.get_instructions(code):
        for operation in _split(instruction, code):
            describes = operation.name == "STORE_NAME" and operation.argument in _SELF_DESCRIPTION
            if describes and (found[-1].has_constant or found[-1].argument == "__name__"):
                found.pop()
            elif operation.name not in _SILENT:
                found.append(operation)
    return found


def _split(instruction: dis.Instruction, code: CodeType) -> Iterator[Operation]:
    position = instruction.positions
    line = (position and position.lineno) or code.co_firstlineno
    name, argument = instruction.opname, instruction.argval
    fused = _FUSED.match(name)
    if fused:
        for part, variable in zip(fused.groups(), argument, strict=True):
            yield Operation(part, variable, variable, line, instruction.offset)
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
    text = "" if is_jump else str(argument) if named else number
    name = _METHOD_LOADS.get(name, _DIRECTION.sub("", name))
    yield Operation(
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
        yield Operation("RETURN_VALUE", None, "", line, instruction.offset)


def _names_something(opcode: int) -> bool:
    return opcode in dis.hasname or opcode in dis.haslocal or opcode in dis.hasfree


def _constant(operation: Operation) -> Constant:
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
