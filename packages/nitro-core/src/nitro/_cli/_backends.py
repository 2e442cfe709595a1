"""`nitro backends`: lists the export backends, and the plugins that failed to load."""

from __future__ import annotations

from nitro._journal import format_columns
from nitro._plugins import Discovery, discover, install_hint


def backends() -> None:
    """List the installed export backends, and the plugins that failed to load."""
    print(_report(discover()))


def _report(discovery: Discovery) -> str:
    lines = format_columns(
        [(name, b.info.summary, b.distribution) for name, b in discovery.backends.items()]
    )
    if not discovery.backends and not discovery.failures:
        lines = ["No export backend is installed.", f"  fix: {install_hint('stablehlo')}"]
    for failure in discovery.failures:
        lines += ["", f"`{failure.name}` cannot be used:"]
        lines += [f"  {line}" for line in str(failure.error).splitlines()]
    return "\n".join(lines).lstrip("\n")
