"""The one store of ahead-of-time compiled programs, shared by every handle of the process."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from nitro._trees import describe_array, named_leaves
from nitro.errors import ProgramError

from ._facts import TraceFacts, facts_of
from ._key import KeyPart, ProgramKey, program_digest
from ._persistent import watch_cache
from ._slow_compile import warn_if_slow
from ._tracing import TracedProgram


@dataclass(frozen=True, kw_only=True)
class ProgramRequest:
    """What the store needs to find a program, or to make it.

    Attributes:
        role: "train step", "forward", "loss" and so on.
        owner: The experiment's class name.
        traced: What was traced, which is what the program is found by.
        parts: What decides it besides: the plan, the configuration of JAX; by label.
        code: What the trace rests on, for explanations only.
        graph: The structural fields' values by label, for explanations only.
        arguments: The abstract positional arguments.
        check: Called with the jaxpr before it is lowered; raises where it must not be
            compiled.
        slow_compile_s: A program that takes longer than this is reported.
        donate: Which arguments the program may overwrite.
        compile_options: Options for XLA.
    """

    role: str
    owner: str
    traced: TracedProgram
    parts: Mapping[str, KeyPart]
    code: Any
    graph: Mapping[str, KeyPart]
    arguments: Sequence[Any]
    check: Callable[[Any], None]
    slow_compile_s: float
    donate: tuple[int, ...] = ()
    compile_options: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """What identifies the program."""
        return program_digest(
            self.role,
            self.traced.digest.text,
            self.parts,
            (self.arguments, self.traced.outputs),
            {**self.compile_options, "donated": self.donate},
        )


class Program:
    """One compiled program: call it with arguments of exactly the compiled shapes."""

    def __init__(
        self,
        key: ProgramKey,
        compiled: Any,
        arguments: Any,
        seconds: float,
        *,
        facts: TraceFacts,
        jaxpr: Any,
    ) -> None:
        self.key = key
        self.jaxpr = jaxpr
        self.compiled = compiled
        self.arguments = arguments
        self.seconds = seconds
        self.facts = facts

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The shapes of all argument leaves."""
        return [leaf.shape for leaf in jax.tree.leaves(self.arguments)]

    @property
    def outputs(self) -> Any:
        """The shapes and dtypes of what it returns."""
        return self.compiled.out_info

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program; donated arguments are gone afterwards.

        Raises:
            ProgramError: An argument does not fit; names the leaf, got and expected.
        """
        try:
            return self.compiled(*arguments)
        except (TypeError, ValueError) as error:
            misfits = _misfits(self.arguments, arguments)
            if not misfits:
                raise
            raise ProgramError(
                f"The {self.key.role} program got arguments that do not fit: {misfits[0]}.",
                expected="the shapes and dtypes that it was compiled for",
                fix="make a new handle for other shapes: a program is never compiled in secret",
            ) from error


class Store:
    """Finds programs by what they compute, and compiles each missing one exactly once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._building: dict[str, threading.Lock] = {}
        self._programs: dict[str, Program] = {}
        self._in_order: list[Program] = []
        self._counts: Counter[str] = Counter()

    def get(self, request: ProgramRequest) -> Program:
        """The program for a request: an existing one, or one compiled now.

        A thread that asks for a program which another is compiling waits for it.
        """
        digest = request.digest()
        with self._lock:
            building = self._building.setdefault(digest, threading.Lock())
        with building:
            with self._lock:
                found = self._programs.get(digest)
            self._count(request.role, hit=found is not None)
            return found or self._build(digest, request)

    def stats(self) -> dict[str, Any]:
        """Hits, misses, entries and compile seconds, in all and by role."""
        with self._lock:
            programs = self._in_order
            roles = sorted({name.partition(":")[2] for name in self._counts if ":" in name})
            return {
                "hits": sum(self._counts[f"hits:{role}"] for role in roles),
                "misses": sum(self._counts[f"misses:{role}"] for role in roles),
                "entries": len(programs),
                "compile_seconds": sum(p.seconds for p in programs),
                "persistent_hits": self._counts["persistent_hits"],
                "persistent_misses": self._counts["persistent_misses"],
                "by_role": {
                    role: {
                        "hits": self._counts[f"hits:{role}"],
                        "misses": self._counts[f"misses:{role}"],
                        "entries": sum(p.key.role == role for p in programs),
                    }
                    for role in roles
                },
            }

    def programs(self) -> list[Program]:
        """Every program, oldest first."""
        with self._lock:
            return list(self._in_order)

    def clear(self) -> None:
        """Forgets every program and resets the counts; handles keep what they hold."""
        with self._lock:
            self._building.clear()
            self._programs.clear()
            self._in_order.clear()
            self._counts.clear()

    def _count(self, role: str, *, hit: bool) -> None:
        with self._lock:
            self._counts[f"{'hits' if hit else 'misses'}:{role}"] += 1

    def _build(self, digest: str, request: ProgramRequest) -> Program:
        started = time.perf_counter()
        traced = request.traced
        request.check(traced.jaxpr)
        with watch_cache() as cache_use:
            compiled = _compile(traced.lower(), request)
        key = ProgramKey(
            role=request.role,
            owner=request.owner,
            parts=request.parts,
            code=request.code,
            graph=request.graph,
            reads=traced.reads,
            options=request.compile_options,
        )
        seconds = time.perf_counter() - started
        facts = facts_of(traced.jaxpr)
        # Open, so that the arrays which it holds are not kept twice.
        opened = traced.jaxpr.jaxpr
        program = Program(key, compiled, request.arguments, seconds, facts=facts, jaxpr=opened)
        with self._lock:
            self._programs[digest] = program
            self._in_order.append(program)
            self._counts["persistent_hits"] += cache_use.hits
            self._counts["persistent_misses"] += cache_use.misses
        name = f"{request.role} program of `{request.owner}`"
        warn_if_slow(name, traced.jaxpr, seconds=seconds, limit_s=request.slow_compile_s)
        return program


store = Store()
"""The store of this process."""


def cache_stats() -> dict[str, Any]:
    """Counts the programs of this process.

    Returns:
        `hits`, `misses` and `entries` of the store; `compile_seconds`, lowering included;
        `persistent_hits` and `persistent_misses`, which say for the misses whether JAX's
        persistent cache had the machine code; and `by_role`, the counts for each kind of
        program.
    """
    return store.stats()


def cache_clear() -> None:
    """Forgets every compiled program and resets the counts.

    Handles that exist keep the programs that they hold.
    """
    store.clear()


def _compile(lowered: Any, request: ProgramRequest) -> Any:
    try:
        return lowered.compile(dict(request.compile_options) or None)
    except jax.errors.JaxRuntimeError as error:
        shapes = ", ".join(f"{n}: {describe_array(a)}" for n, a in _largest_leaves(request))
        raise ProgramError(
            f"XLA cannot compile the {request.role} program of `{request.owner}`: "
            f"{str(error)[:2000]}",
            expected=f"a program that fits the device; its largest arguments are {shapes}",
            fix="look at the shapes, and at `compile_options` if you gave any; the whole message "
            f"and the program are in {_dump(lowered, error)}",
        ) from error


def _dump(lowered: Any, error: Exception) -> str:
    """Writes a program that does not compile to a file of its own; returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="nitro-compile-", suffix=".mlir", encoding="utf-8", delete=False
    ) as file:
        message = str(error).replace("\n", "\n// ")
        file.write(f"// {message}\n{lowered.as_text(debug_info=True)}")
    return file.name


def _largest_leaves(request: ProgramRequest) -> list[tuple[str, Any]]:
    leaves = named_leaves(tuple(request.arguments)).items()
    return sorted(leaves, key=lambda item: -item[1].size)[:6]


def _misfits(expected: Any, got: Sequence[Any]) -> list[str]:
    wanted, given = named_leaves(tuple(expected)), named_leaves(tuple(got))
    lines = [f"`{name}` is missing" for name in wanted if name not in given]
    lines += [f"`{name}` is not expected" for name in given if name not in wanted]
    for name in wanted.keys() & given.keys():
        have = given[name] if hasattr(given[name], "dtype") else jax.numpy.asarray(given[name])
        if describe_array(have) != describe_array(wanted[name]):
            lines.append(
                f"`{name}` is {describe_array(have)}, expected {describe_array(wanted[name])}"
            )
    return lines
