"""Numbers to try for symbolic sizes: small and large, odd and prime, all allowed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from nitro.errors import ExportError

from ._dims import constraint_symbols, evaluate_size, is_kept
from ._program import batch_symbol
from ._spec import ExportSpec

# Odd and prime ones, powers of two, and their neighbours.
_USUAL = (1, 3, 8, 2, 5, 17, 7, 16, 12, 31, 64)

MAX_SEARCHED = 4096
"""How far a size is searched that keeps the constraints."""

Sizes = Mapping[str, int]


class Assignments:
    """Chooses values for symbols that keep the constraints of an export."""

    def __init__(
        self, inputs: Sequence[ExportSpec], constraints: Sequence[str], symbols: Sequence[str]
    ) -> None:
        """Takes the promise, and the symbols to choose for, in the order of results."""
        self._inputs = tuple(inputs)
        self._constraints = tuple(constraints)
        self._symbols = tuple(symbols)
        self._batch = batch_symbol(inputs)

    def choose(self) -> list[dict[str, int]]:
        """Some values for all symbols; one empty choice where there are none.

        Raises:
            ExportError: No sizes keep the constraints.
        """
        if not self._symbols:
            return [{}]
        lists = [self._candidates(symbol) for symbol in self._symbols]
        pairs = list(zip(self._symbols, lists, strict=True))
        # A stride for each symbol: all smallest first, and then not equal all the time.
        strided = (
            {symbol: found[i * k % len(found)] for k, (symbol, found) in enumerate(pairs, 1)}
            for i in range(max(map(len, lists)))
        )
        fitting = [values for values in strided if self.fits(values)]
        if not fitting:
            pool = itertools.islice(itertools.product(*lists), MAX_SEARCHED)
            every = (dict(zip(self._symbols, values, strict=True)) for values in pool)
            fitting = [values for values in every if self.fits(values)][:1]
        if not fitting:
            raise ExportError(
                f"No sizes up to {MAX_SEARCHED} keep {', '.join(map(repr, self._constraints))}.",
                expected="constraints that some sizes keep",
            )
        return fitting

    def enlarge(self, symbol: str) -> list[dict[str, int]]:
        """Powers of two, and the largest size that is allowed, for one symbol; largest first.

        The other symbols have the smallest values that fit beside them.
        """
        powers = {2**i for i in range(7, MAX_SEARCHED.bit_length())}
        most = next((n for n in range(MAX_SEARCHED, 0, -1) if self.are_allowed({symbol: n})), 0)
        sizes = sorted({n for n in (*powers, most) if n}, reverse=True)
        small = self.choose()[0]
        return [values for n in sizes if self.fits(values := {**small, symbol: n})]

    def are_allowed(self, values: Sizes) -> bool:
        """Whether sizes keep those constraints whose names all have values."""
        known = (c for c in self._constraints if constraint_symbols(c) <= set(values))
        return all(is_kept(constraint, values) for constraint in known)

    def fits(self, values: Sizes) -> bool:
        """Whether sizes keep the constraints, and no axis would have less than 1."""
        given = {self._batch: 1, **values}
        sizes = (size for spec in self._inputs for size in spec.sizes(1))
        return self.are_allowed(values) and all(evaluate_size(size, given) >= 1 for size in sizes)

    def _candidates(self, symbol: str) -> list[int]:
        usual = [n for n in _USUAL if self.are_allowed({symbol: n})]
        searched = (n for n in range(1, MAX_SEARCHED + 1) if self.are_allowed({symbol: n}))
        return usual if len(usual) >= 4 else list(itertools.islice(searched, 8)) or [1]
