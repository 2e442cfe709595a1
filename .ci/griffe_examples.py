"""Lets the documentation show `Example:` in a docstring as what it is: code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section: griffe's parser knows only `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **more: Any) -> None:
        """Called for each object when its package is loaded, before docstrings are parsed."""
        del more
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
