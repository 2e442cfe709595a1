"""`nitro backends`: lists the export backends, and the plugins that failed to load."""

from __future__ import annotations

from collections.abc import Sequence

from nitro._plugins import Discovery, discover, install_hint


def backends() -> None:
    """List the installed export backends, and the plugins that failed to load."""
    print(_report(discover()))


def _report(discovery: Discovery) -> str:
    lines = _columns(
        [(name, b.info.summary, b.distribution) for name, b in discovery.backends.items()]
    )
    if not discovery.backends and not discovery.failures:
        lines = ["No export backend is installed.", f"  fix: {install_hint('stablehlo')}"]
    for failure in discovery.failures:
        lines += ["", f"`{failure.name}` cannot be used:"]
        lines += [f"  {line}" for line in str(failure.error).splitlines()]
    return "\n".join(lines).lstrip("\n")


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
