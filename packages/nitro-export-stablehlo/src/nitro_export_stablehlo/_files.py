"""The files of a bundle: written with their digests, and found again without surprises."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nitro.errors import BundleError


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """What `nitro.json` promises about one file.

    Attributes:
        sha256: The digest of its bytes, in lower-case hexadecimal.
        size_bytes: How many there are.
    """

    sha256: str
    size_bytes: int


class FileWriter:
    """Writes files into a bundle's directory and digests them on the way.

    Attributes:
        digests: The digest of each file written so far.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.digests: dict[str, FileDigest] = {}

    def write(self, name: str, data: bytes) -> None:
        """Writes one file whole."""
        with self.open(name) as sink:
            sink.write(data)

    @contextmanager
    def open(self, name: str) -> Generator[DigestingSink, None, None]:
        """Opens one file to be written piece by piece."""
        path = self._root / name
        path.parent.mkdir(exist_ok=True)
        with path.open("xb") as opened:
            sink = DigestingSink(opened)
            yield sink
        self.digests[name] = sink.digest()


class DigestingSink:
    """A binary file that only takes bytes, and knows their digest."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0

    def write(self, data: Any) -> None:
        """Appends a bytes-like object."""
        self._opened.write(data)
        self._sha256.update(data)
        self._size_bytes += len(data)

    def digest(self) -> FileDigest:
        """The digest of all that was written."""
        return FileDigest(sha256=self._sha256.hexdigest(), size_bytes=self._size_bytes)


class FileReader:
    """Finds a bundle's files; none outside its directory, and no link or device."""

    def __init__(self, root: Path) -> None:
        """Opens a bundle's directory.

        Raises:
            BundleError: There is no such directory.
        """
        if not root.is_dir():
            raise BundleError(
                f"`{root}` is not a bundle: it is {'a file' if root.exists() else 'not there'}.",
                expected="the directory that `export_model` returned",
            )
        self.root = root

    def path(self, name: str) -> Path:
        """The path of a regular file of the bundle.

        Raises:
            BundleError: The file is missing, is a link, or lies elsewhere.
        """
        check_name(name)
        path = self.root
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise BundleError(
                    f"`{name}` is a symbolic link.",
                    expected="a regular file: a bundle holds all that it needs",
                    fix="copy the bundle with links followed, such as `cp -rL`",
                )
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise BundleError(
                f"`{name}` cannot be opened: {error.strerror}.",
                expected=f"a file of the bundle `{self.root}`",
                fix="pass the directory that `export_model` returned; if this is it, copy the "
                "bundle again, whole",
            ) from error
        if not stat.S_ISREG(mode):
            raise BundleError(f"`{name}` is not a regular file.", expected="a regular file")
        return path

    def read(self, name: str, *, limit_bytes: int | None = None) -> bytes:
        """The bytes of one file.

        Raises:
            BundleError: As for `path`, or more bytes than `limit_bytes`.
        """
        path = self.path(name)
        size = path.stat().st_size
        if limit_bytes is not None and size > limit_bytes:
            raise BundleError(f"`{name}` has {size} bytes.", expected=f"at most {limit_bytes}")
        return path.read_bytes()

    def check(self, name: str, promised: FileDigest) -> None:
        """Compares one file with its promised size and digest.

        Raises:
            BundleError: They differ; gives both.
        """
        path = self.path(name)
        size = path.stat().st_size
        if size != promised.size_bytes:
            raise _changed(name, f"{size} bytes", f"{promised.size_bytes} bytes")
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != promised.sha256:
            raise _changed(name, f"the sha256 {found}", promised.sha256)

    def check_all(self, promised: Mapping[str, FileDigest]) -> None:
        """Compares every file with its digest; the smallest first, to fail early."""
        for name, digest in sorted(promised.items(), key=lambda item: item[1].size_bytes):
            self.check(name, digest)


def check_name(name: str) -> None:
    """Refuses a file name that could lead out of the bundle.

    Raises:
        BundleError: An absolute name, a `..`, a drive, or a character that some system
            reads as a separator.
    """
    parts = name.split("/")
    if any(part in {"", ".", ".."} for part in parts) or set(name) & set("\\:\0"):
        raise BundleError(
            f"`nitro.json` names the file {name[:80]!r}.",
            expected="a relative path inside the bundle, such as `jax/model.b1.jax_export`",
        )


def _changed(name: str, found: str, promised: str) -> BundleError:
    return BundleError(
        f"`{name}` has changed since the export: it has {found}.",
        expected=f"{promised}, by `nitro.json`",
        fix="copy the bundle again; or, if the change is meant, make it with "
        "`nitro-bundle swap-weights`",
    )
