"""A look at the frame of MLIR bytecode, before the reader that trusts its input.

The frame is described in https://mlir.llvm.org/docs/BytecodeFormat/: a magic number, a
version, the producer's name, then sections that each give their length.
"""

from __future__ import annotations

from nitro.errors import BundleError

MAGIC = b"ML\xefR"

_ALIGNED = 0x80
_PADDING = 0xCB
# Strings, dialects, attributes and types, their offsets, and the program.
_NEEDED = frozenset(range(5))
_MAX_SECTION = 8


def check_frame(data: bytes, *, file: str) -> None:
    """Checks that the sections fill the file to its end.

    Raises:
        BundleError: Not MLIR bytecode, or cut off, or with something in between.
    """
    if not data.startswith(MAGIC):
        raise BundleError(
            f"`{file}` starts with the bytes {data[:4]!r}.",
            expected=f"{MAGIC!r}: a StableHLO portable artifact",
        )
    try:
        _, at = _varint(data, len(MAGIC))
        at = data.index(0, at) + 1
        found = set[int]()
        while at < len(data):
            section = data[at]
            length, at = _varint(data, at + 1)
            if section & _ALIGNED:
                _, at = _varint(data, at)
                while data[at] == _PADDING:
                    at += 1
            found.add(section & ~_ALIGNED)
            at += length
        if not found >= _NEEDED or max(found) > _MAX_SECTION:
            raise ValueError(f"it has the sections {sorted(found)}")
        if at != len(data):
            raise ValueError(f"its last section ends at byte {at} of {len(data)}")
    except (ValueError, IndexError) as error:
        raise BundleError(
            f"`{file}` is damaged: {error}.", expected="whole MLIR bytecode"
        ) from error


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer whose trailing zero bits say how many bytes it has; and where it ends."""
    first = data[at]
    if first == 0:
        return int.from_bytes(data[at + 1 : at + 9], "little"), at + 9
    size = (first & -first).bit_length()
    return int.from_bytes(data[at : at + size], "little") >> size, at + size
