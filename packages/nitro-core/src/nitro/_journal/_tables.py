"""Tables and reports, as text that fits a width and as HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_GAP = "  "
_ANY_WIDTH = 10**5
"""Wider than any table: who shows it on a screen chooses the columns that fit."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells that are text already.

    Attributes:
        columns: The headings; the first column is aligned left, the others right, but for
            those in `aligned_left`.
        rows: The cells, as many in each row as there are headings.
        notes: What the table leaves out, one sentence each.
        aligned_left: The columns of words, counted from 0.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    aligned_left: tuple[int, ...] = ()

    def widths(self) -> list[int]:
        """The characters that each column needs."""
        return [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

    def to_text(self) -> str:
        """Aligned columns, then the notes."""
        lines = format_columns([self.columns, *self.rows], aligned_left=(0, *self.aligned_left))
        return "\n".join([*lines, *self.notes])

    def to_html(self) -> str:
        """One table, then the notes in small print."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.rows
        )
        notes = "".join(f"<div><small>{html.escape(note)}</small></div>" for note in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled list of lines; a line that starts with spaces belongs to the one before."""

    title: str
    lines: tuple[str, ...]


class Report(str):
    """A report: text to print, search and log; in a notebook it shows its sections."""

    __slots__ = ("sections",)
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, title: str, sections: Iterable[Section]) -> Report:
        """Puts sections under a title; empty ones are left out."""
        kept = tuple(section for section in sections if section.lines)
        lines = [title]
        for section in kept:
            lines.append(f"  {section.title}")
            lines += [f"    {line}" for line in section.lines]
        report = cls("\n".join(lines))
        report.sections = (Section(title=title, lines=()), *kept)
        return report

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        title, *sections = self.sections
        parts = [f"<strong>{html.escape(title.title)}</strong>"]
        for section in sections:
            lines = html.escape("\n".join(section.lines))
            parts.append(
                f"<details open><summary>{html.escape(section.title)}</summary>"
                f"<pre>{lines}</pre></details>"
            )
        return "".join(parts)


def format_columns(
    rows: Sequence[Sequence[str]], *, aligned_left: Sequence[int] | None = None
) -> list[str]:
    """Lines of aligned columns, two spaces apart.

    Args:
        rows: The cells, as many in each row.
        aligned_left: The columns that are aligned left, counted from 0; None for all.
    """
    if not rows:
        return []
    from rich.console import Console  # here: a start without a table does without it
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, len(_GAP), 0, 0))
    for index in range(len(rows[0])):
        is_left = aligned_left is None or index in aligned_left
        grid.add_column(justify="left" if is_left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))
    lines = io.StringIO()
    Console(file=lines, width=_ANY_WIDTH, color_system=None).print(grid)
    return [line.rstrip() for line in lines.getvalue().splitlines()]


def text_width(widths: Sequence[int]) -> int:
    """The characters of a line with columns of these widths."""
    return sum(widths) + len(_GAP) * max(0, len(widths) - 1)
