"""Finds a promise about symbolic sizes under which an export works, by trying it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Sizes = Mapping[str, int]

_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 12, 16)
_MEASURED = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 64)
_MAX_SIZES = 60
_MAX_CHAIN = 4

_PATIENCE_S = 30.0
"""How long a search may take: a trace of a large model takes seconds."""

NOTHING_HELPS = (
    "fix the size, or let no hook depend on it: no bound and no multiple that was tried helps"
)


class Traces(Protocol):
    """What a search may ask: whether the hooks can be traced."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbolic sizes, the batch last where it is one."""
        ...

    @property
    def constraints(self) -> tuple[str, ...]:
        """What is promised already."""
        ...

    @property
    def batch(self) -> str:
        """What the batch is called."""
        ...

    def fits(self, values: Sizes) -> bool:
        """Whether sizes keep the constraints."""
        ...

    def works(self, values: Sizes) -> bool:
        """Whether a trace at fixed sizes succeeds; False where they break a constraint."""
        ...

    def assignments(self) -> list[dict[str, int]]:
        """Sizes to try, which keep the constraints."""
        ...

    def numbers(self, values: Sizes) -> frozenset[int]:
        """All sizes of arrays in a trace at fixed sizes."""
        ...

    def problem_with(
        self, constraints: Sequence[str], multiple: tuple[str, int] | None = None
    ) -> str | None:
        """Why the symbolic trace, or one at fixed sizes, fails under more promises; else None."""
        ...


@dataclass(frozen=True)
class _Measured:
    """What traces at fixed sizes say about one symbol.

    Attributes:
        bounds: The constraints that leave out what fails at an end.
        divisors: The numbers whose multiples all work, where others fail; ascending.
    """

    bounds: tuple[str, ...] = ()
    divisors: tuple[int, ...] = ()


def advise(traces: Traces, message: str) -> str:
    """What to promise so that an export works, as a `fix`; every promise was tried.

    Args:
        traces: The export that fails.
        message: Why, in JAX's words: a comparison of sizes that it could not decide is
            the first candidate.
    """
    search = _Search(traces)
    measured = {symbol: search.measure(symbol) for symbol in traces.symbols}
    chain = search.decide(message)
    bounds = tuple(itertools.chain.from_iterable(found.bounds for found in measured.values()))
    candidates = [chain, bounds, *(found.bounds for found in measured.values()), (*bounds, *chain)]
    for constraints in dict.fromkeys(filter(None, candidates)):
        if search.helps(constraints):
            return propose((*traces.constraints, *constraints))
    for symbol, divisor in search.multiples(measured):
        ways = search.ways_to_promise_multiple(symbol, divisor)
        if ways:
            is_needed = divisor in measured[symbol].divisors
            start = f"only multiples of {divisor} work" if is_needed else "promise a multiple"
            return f"{start}: {', or '.join(ways)}"
    for constraints in search.guesses():
        if search.helps(constraints):
            return propose((*traces.constraints, *constraints))
    return NOTHING_HELPS


def propose(constraints: Sequence[str]) -> str:
    """The words that tell a user to promise this."""
    return f"promise what works: pass {_option(constraints)}"


def largest_working(works: Callable[[int], bool], good: int, bad: int) -> int:
    """The largest size from `good` to below `bad` that works, if all smaller ones do."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if works(middle) else (good, middle)
    return good


class _Search:
    """Tries promises, until its patience ends."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._end = time.monotonic() + _PATIENCE_S
        self._base = self._find_base()
        self._numbers = sorted(traces.numbers(self._base) if self._base else ())

    def helps(self, constraints: Sequence[str], multiple: tuple[str, int] | None = None) -> bool:
        """Whether everything traces under these promises."""
        return self._has_time and self._traces.problem_with(constraints, multiple) is None

    def measure(self, symbol: str) -> _Measured:
        """Tries fixed sizes of one symbol, and looks for what those that work share."""
        if self._base is None:
            return _Measured()
        allowed = [n for n in self._sizes() if self._traces.fits({**self._base, symbol: n})]
        works = {n: self._works_at(symbol, n) for n in allowed if self._has_time}
        if all(works.values()) or not any(works.values()):
            return _Measured()
        divisors = {*_DIVISORS, *(n for n in self._numbers if 1 < n <= max(works) // 2)}
        return _Measured(
            bounds=self._bounds(symbol, works),
            divisors=tuple(
                d
                for d in sorted(divisors)
                if all(self._works_at(symbol, d * i) for i in (1, 2, 3))
                and not all(fits for n, fits in works.items() if n % d)
            ),
        )

    def decide(self, message: str) -> tuple[str, ...]:
        """Constraints that decide one comparison after another that JAX cannot decide."""
        found = list[str]()
        problem: str | None = message
        while problem and len(found) < _MAX_CHAIN and self._has_time:
            constraint = _compared(problem)
            if not constraint or constraint in found:
                break
            found.append(constraint)
            problem = self._traces.problem_with(found)
        return tuple(found)

    def multiples(self, measured: Mapping[str, _Measured]) -> Iterator[tuple[str, int]]:
        """A symbol and a divisor each: first those that traces at fixed sizes ask for."""
        for symbol, found in measured.items():
            yield from ((symbol, divisor) for divisor in found.divisors)
        for divisor, symbol in itertools.product(_DIVISORS, self._traces.symbols):
            if divisor not in measured[symbol].divisors:
                yield symbol, divisor

    def guesses(self) -> Iterator[tuple[str, ...]]:
        """Bounds out of the sizes in the trace, for what only the symbolic trace refuses."""
        for symbol in self._traces.symbols:
            for number in self._numbers[:_MAX_SIZES]:
                yield (f"{symbol} >= {number}",)
                yield (f"{symbol} <= {number}",)

    def ways_to_promise_multiple(self, symbol: str, divisor: int) -> list[str]:
        """How to say that a size is a multiple, of the two ways there are."""
        ways = list[str]()
        symbols = self._traces.symbols
        if symbol != self._traces.batch and self.helps((), (symbol, divisor)):
            name = "k" if "k" not in symbols else f"{symbol}_by_{divisor}"
            ways.append(f'write "{divisor}*{name}" instead of "{symbol}" in `export_inputs`')
        constraint = f"mod({symbol}, {divisor}) == 0"
        if self.helps((constraint,)):
            ways.append(f"pass {_option((*self._traces.constraints, constraint))}")
        return ways

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._end

    def _find_base(self) -> dict[str, int] | None:
        """Sizes that work, to vary one of."""
        symbols = self._traces.symbols
        usual = ((n,) * len(symbols) for n in (8, 4, 6, 12, 16, 32, 1))
        mixed = itertools.islice(itertools.product(_MEASURED, repeat=len(symbols)), 200)
        every = (dict(zip(symbols, numbers, strict=True)) for numbers in (*usual, *mixed))
        tried = itertools.chain(self._traces.assignments(), every)
        return next((v for v in tried if self._has_time and self._traces.works(v)), None)

    def _sizes(self) -> list[int]:
        near = {m for n in self._numbers for m in (n - 1, n, n + 1) if m >= 1}
        return sorted({*_MEASURED, *sorted(near)[:_MAX_SIZES]})

    def _works_at(self, symbol: str, number: int) -> bool:
        assert self._base is not None
        return self._traces.works({**self._base, symbol: number})

    def _bounds(self, symbol: str, works: Mapping[int, bool]) -> tuple[str, ...]:
        """Where the longest row of sizes that work begins and ends."""
        rows = [list(row) for fits, row in itertools.groupby(works, key=works.__getitem__) if fits]
        row = max(rows, key=len)
        below = max((n for n in works if n < row[0]), default=0)
        above = min((n for n in works if n > row[-1]), default=0)
        # Single sizes among others that fail follow another rule than a bound.
        if len(row) < 2 + bool(below and above):
            return ()
        at_least = below + 1
        if below:
            # The other way round: the largest size that fails.
            fails = lambda n: not self._works_at(symbol, n)  # noqa: E731
            at_least = largest_working(fails, below, row[0]) + 1
        at_most = largest_working(lambda n: self._works_at(symbol, n), row[-1], above)
        lower = (f"{symbol} >= {at_least}",) if below else ()
        return (*lower, f"{symbol} <= {at_most}") if above else lower


def _option(constraints: Sequence[str]) -> str:
    listed = ", ".join(f'"{constraint}"' for constraint in constraints)
    return f"`constraints=({listed},)`"


def _compared(message: str) -> str:
    """The constraint that would decide a comparison which JAX could not; "" if none."""
    found = re.search(r"comparison '(.+?)' (>=|<=|>|<|==) '(.+?)' is inconclusive", message)
    if not found:
        return ""
    left, relation, right = found.groups()
    strict = {">": 1, "<": -1}.get(relation, 0)
    try:
        right = str(int(right) + strict)
    except ValueError:
        right += f" {strict:+d}" if strict else ""
    kept = relation if relation in {">=", "<=", "=="} else relation + "="
    return f"{left} {kept} {right}"
