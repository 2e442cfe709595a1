"""Says the fix of a message in flags: who types a command passes no keywords."""

from __future__ import annotations

import re

_SWITCHES = {
    r'resume="auto"': "--resume",
    r"resume=True": "--resume",
    r"overwrite=True": "--overwrite",
    r"dynamic_batch=True": "--dynamic-batch",
}
_VALUES = {
    "max_epochs": "--max-epochs",
    "run_dir": "--run-dir",
    "seed": "--seed",
    "batch_sizes": "--batch-sizes",
    "checkpoint": "--checkpoint",
    "split": "--split",
    "dir": "--dir",
    "name": "--name",
}
_BARE = ("max_epochs", "run_dir", "batch_sizes")
_CALL = re.compile(r"(?<![\w.])(?:nitro\.)?(?:Nitro|export_model)\(\.\.\., ([^()]*)\)")
_VALUE = r'(\([^()]*\)|"[^"]*"|[^\s`,()]*)'


def say_in_flags(message: str) -> str:
    """A message whose lines `expected:` and `fix:` name flags instead of keywords."""
    problem, *rest = message.split("\n")
    return "\n".join([problem, *(_in_flags(line) for line in rest)])


def _in_flags(line: str) -> str:
    line = _CALL.sub(r"\1", line)
    for keyword, flag in _SWITCHES.items():
        line = re.sub(rf"(?<![\w-]){keyword}", flag, line)
    for name, flag in _VALUES.items():
        line = re.sub(rf"(?<![\w.-]){name}={_VALUE}", lambda m: _flag(flag, m[1]), line)  # noqa: B023 - used at once
    for name in _BARE:
        line = line.replace(f"`{name}`", f"`{_VALUES[name]}`")
    return line


def _flag(flag: str, value: str) -> str:
    value = re.sub(r"[()\s]", "", value).strip(",\"'") if value.startswith("(") else value
    return f"{flag} {value}".rstrip()
