"""Every code block of the README and the docs runs, page by page, as a reader would run it.

What a fenced block is, by its info string:

- `python`: runs in the page's own namespace. Where it ends in an error, the `text` block
  behind it shows that error.
- any language with `title="FILE"`: is written to that file; a second one with the same
  title is added to it.
- `console`: lines with `$ ` are run in order, the others are what they print.
- `sh`: every line is run; one that installs must name a package and an extra that exist.
- `text`: what the block in front of it prints. `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import nitro
from nitro.errors import NitroError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(DOCS.rglob("*.md")),
]

TUTORIAL = DOCS / "tutorial.md"

NEEDS = {
    "docs/how-to/export-savedmodel.md": ["tensorflow", "keras"],
    "docs/how-to/serve.md": ["tritonclient.http"],
    "packages/nitro-serve/README.md": ["nitro_serve"],
    "docs/how-to/see-a-run.md": ["matplotlib", "pandas", "tensorboardX", "mlflow"],
}
"""The packages of optional groups that a page shows."""

ELSEWHERE = {"docs/how-to/write-a-backend.md"}
"""Pages that `test_third_party_backend.py` builds, installs and runs."""

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_CHECKER = doctest.OutputChecker()
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its title, its text, and the line where that begins."""

    language: str
    title: str | None
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: A fence that never ends.
    """
    found = list[Block]()
    lines = iter(enumerate(page.read_text("utf-8").splitlines(), 1))
    for number, line in lines:
        if (opening := _FENCE.match(line)) is None:
            continue
        body = list[str]()
        for _, inner in lines:
            if inner.strip() == opening["fence"]:
                break
            body.append(inner.removeprefix(opening["indent"]) + "\n")
        else:
            raise ValueError(f"{page}:{number}: this block never ends")
        language, _, options = opening["info"].strip().partition(" ")
        title = re.fullmatch(r'title="(.+)"', options)
        if options and title is None:
            raise ValueError(f"{page}:{number}: cannot read {options!r}")
        found.append(
            Block(
                language=language,
                title=title[1] if title else None,
                text="".join(body),
                line=number + 1,
            )
        )
    return found


@dataclass
class Reader:
    """Somebody who types a page's blocks into an empty directory, and looks at the output."""

    page: Path
    folder: Path
    names: dict[str, Any]
    output: str | None = None
    error: BaseException | None = None
    titles: set[str] = field(default_factory=set[str])

    def follow(self, blocks: list[Block]) -> None:
        """Does what each block says."""
        for block in blocks:
            if block.language == "text":
                self._compare(block)
                continue
            self._expect_no_error()
            self.output = None
            if block.title is not None:
                self._write(block, block.title)
            elif block.language == "python":
                self._execute(block)
            elif block.language == "console":
                self._type(block)
            elif block.language == "sh":
                self.output = "".join(map(self._run, block.text.splitlines()))
            else:
                pytest.fail(f"{self._at(block)}: nothing runs a block of {block.language!r}")
        self._expect_no_error()

    def _at(self, block: Block) -> str:
        return f"{self.page.name}:{block.line}"

    def _write(self, block: Block, title: str) -> None:
        path = self.folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        more = title in self.titles
        self.titles.add(title)
        with path.open("a" if more else "w", encoding="utf-8") as file:
            # Between two pieces there is a blank line, as on the page.
            file.write(("\n" if more else "") + block.text)

    def _execute(self, block: Block) -> None:
        # The lines keep their numbers, so that a traceback and `inspect` find the page.
        source = "\n" * (block.line - 1) + block.text
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(source, str(self.page), "exec"), self.names)
            except NitroError as error:
                self.error = error
                printed.write(f"{type(error).__module__}.{type(error).__qualname__}: {error}\n")
        self.output = printed.getvalue()

    def _type(self, block: Block) -> None:
        parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"{self._at(block)}: begin with a command: `$ ...`"
        for part in parts[1:]:
            command, _, shown = re.sub(r"\\\n", "", part).partition("\n")
            printed = self._run(command)
            if shown.strip():
                self._same(block, shown, printed)

    def _run(self, command: str) -> str:
        if command.startswith("pip install "):
            _check_installable(command.partition("  #")[0].rstrip())
            return ""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command],
            env={**os.environ, "PATH": path, "COLUMNS": "100"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{self.page.name}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _compare(self, block: Block) -> None:
        assert self.output is not None, f"{self._at(block)}: no code stands in front of it"
        self._same(block, block.text, self.output)
        self.output = self.error = None

    def _same(self, block: Block, shown: str, printed: str) -> None:
        if not _CHECKER.check_output(shown, printed, _LOOSE):
            pytest.fail(f"{self._at(block)}: the page shows\n{shown}\nand it prints\n{printed}")

    def _expect_no_error(self) -> None:
        if self.error is not None:
            raise self.error


def _check_installable(command: str) -> None:
    """Checks that `pip install "name[extra]"` names one of our packages and an extra of it."""
    requirement = command.removeprefix("pip install ").strip().strip("\"'")
    name, _, extra = requirement.removesuffix("]").partition("[")
    extras = importlib.metadata.metadata(name).get_all("Provides-Extra") or []
    assert name.startswith("nitro-"), requirement
    assert not extra or extra in extras, f"{requirement}: {extras}"


def _write_tutorial(folder: Path) -> None:
    """Writes `digits.py` as the tutorial leaves it: the how-to pages begin there."""
    reader = Reader(page=TUTORIAL, folder=folder, names={})
    reader.follow([block for block in blocks_of(TUTORIAL) if block.title == "digits.py"])


def _readme_names() -> dict[str, Any]:
    """What the README takes for granted: two splits, and pixels to predict from."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, label = load_digits(return_X_y=True)
    parts: Any = train_test_split(pixels.astype(np.uint8), label.astype(np.int32), random_state=0)
    train_x, val_x, train_y, val_y = parts
    splits = [
        {"img": x.astype(np.float32) / 16, "label": y}
        for x, y in ((train_x, train_y), (val_x, val_y))
    ]
    return {"load_digits": lambda: splits, "pixels": val_x, "val_label": val_y}


def _check_readme(names: dict[str, Any], folder: Path) -> None:
    from nitro_export_stablehlo import load_bundle

    served = load_bundle(folder / "export_out" / "digits_v1")(img=names["pixels"])["logits"]
    assert (served.argmax(-1) == names["val_label"]).mean() >= 0.95
    assert names["run"].validate()["acc"] >= 0.95


def _check_tutorial(names: dict[str, Any], folder: Path) -> None:
    assert names["run"].validate()["acc"] >= 0.95
    assert (folder / "digits.py").read_text().count("class ") == 1


def _check_saved_model(names: dict[str, Any], folder: Path) -> None:
    written = sorted(path.name for path in (folder / "export_out").iterdir())
    assert written == ["digits_v1", "for_2_18", "tuned"]
    assert names["flat"][4:8] == b"TFL3"


CHECKS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "README.md": _check_readme,
    "docs/tutorial.md": _check_tutorial,
    "docs/how-to/export-savedmodel.md": _check_saved_model,
}
"""What must hold behind a page, besides what it shows."""


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _cases() -> Iterator[Any]:
    for page in PAGES:
        name = _name(page)
        if not blocks_of(page) or name in ELSEWHERE:
            continue
        uses_tf = "tensorflow" in NEEDS.get(name, [])
        yield pytest.param(page, id=name, marks=[pytest.mark.tf] if uses_tf else [])


@pytest.mark.slow
@pytest.mark.parametrize("page", list(_cases()))
def test_the_code_of_the_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS.get(_name(page), []):
        pytest.importorskip(package, reason=f"{page.name} shows {package}")
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if page != TUTORIAL:
        _write_tutorial(tmp_path)
    names = vars(module)
    names |= _readme_names() if page == ROOT / "README.md" else {}
    nitro.cache_clear()  # a reader starts a process

    try:
        Reader(page=page, folder=tmp_path, names=names).follow(blocks_of(page))
        CHECKS.get(_name(page), lambda names, folder: None)(names, tmp_path)
    finally:
        for own in [name for name, m in sys.modules.items() if _is_in(m, tmp_path)]:
            del sys.modules[own]  # the next page has another `digits`


def _is_in(module: types.ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def test_pages_that_run_elsewhere_have_nothing_but_what_runs_there() -> None:
    (name,) = ELSEWHERE
    example = ROOT / "examples" / "third_party_backend"
    blocks = blocks_of(ROOT / name)

    rest = [b for b in blocks if not (b.title and (example / b.title).is_file())]

    assert [(b.language, b.title) for b in rest] == [
        ("python", "tests/test_backend.py"),
        ("console", None),
    ]
    assert "pip install . && nitro backends" in rest[1].text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```julia\n1\n```\n", "nothing runs a block of 'julia'"),
        ("```\n1\n```\n", "nothing runs a block of ''"),
        ("```text\n1\n```\n", "no code stands in front of it"),
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "the page shows"),
        ("```console\n$ echo 1\n2\n```\n", "the page shows"),
        ("```sh\nfalse\n```\n", "false"),
        ('```sh\npip install "nitro-core[jax2onnx]"\n```\n', "jax2onnx"),
    ],
)
def test_a_block_that_does_not_hold_fails(text: str, wrong: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    reader = Reader(page=page, folder=tmp_path, names={})

    with pytest.raises((AssertionError, pytest.fail.Exception), match=re.escape(wrong)):
        reader.follow(blocks_of(page))


def test_a_fence_that_never_ends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```python\n1\n")

    with pytest.raises(ValueError, match="never ends"):
        blocks_of(tmp_path / "page.md")


_PROSE = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "changelog.d" / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
    *sorted(DOCS.rglob("*.md")),
]


@pytest.mark.parametrize("page", [pytest.param(page, id=_name(page)) for page in _PROSE])
def test_relative_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"^(`{3,})[^`]*?^\1$", "", page.read_text("utf-8"), flags=re.M | re.S)
    prose = re.sub(r"`[^`\n]*`(?!\])", "", prose)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r"^\[[^\]]+\]: (\S+)", prose, re.M)
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]

    missing = [target for target in local if not (page.parent / target).exists()]

    assert not missing


def test_contributing_names_places_that_are_there() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    places = re.findall(r"`([^`]+)`", " ".join(rows))

    assert len(places) > 5
    assert [place for place in places if not list(ROOT.glob(place))] == []


def _names_of_reference() -> set[str]:
    pages = sorted((DOCS / "reference").glob("*.md"))
    text = "\n".join(page.read_text("utf-8") for page in pages)
    return set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize(
    "package",
    ["nitro", "nitro.export", "nitro.testing", "nitro_export_stablehlo", "nitro_export_tf"],
)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    module = importlib.import_module(package)
    names = [n for n in module.__all__ if not isinstance(getattr(module, n), types.ModuleType)]
    shown = _names_of_reference()
    # The core's facade offers some names of `nitro.export` again.
    also = {name.replace("nitro.export.", "nitro.") for name in shown}

    missing = [n for n in names if f"{package}.{n}" not in shown | also]

    assert not missing
    assert len(names) >= 3


def test_modules_whose_names_are_all_public_are_in_the_reference() -> None:
    assert {"nitro.errors", "nitro.hooks"} <= _names_of_reference()


def _commands() -> Iterator[Any]:
    from nitro._cli import app
    from nitro_export_stablehlo._cli import app as bundle_app

    programs = {"nitro": app, "nitro-bundle": bundle_app}
    if importlib.util.find_spec("nitro_serve") is not None:
        from nitro_serve._cli import app as serve_app

        programs["nitro-serve"] = serve_app
    for program, typer_app in programs.items():
        command: Any = typer.main.get_command(typer_app)
        for name, inner in command.commands.items():
            yield pytest.param(inner, id=f"{program} {name}")


@pytest.mark.parametrize("command", list(_commands()))
def test_every_command_is_in_the_reference(command: Any, request: pytest.FixtureRequest) -> None:
    page = (DOCS / "reference" / "commands.md").read_text("utf-8").replace("\\|", "|")
    title = request.node.callspec.id
    section = page.partition(f"### {title}\n")[2].partition("\n## ")[0].partition("\n### ")[0]

    wanted = [command.help, *(parameter.help for parameter in command.params)]
    flags = [p.opts[0] for p in command.params if p.param_type_name == "option"]

    assert [text for text in wanted if text and text not in section] == []
    assert [flag for flag in flags if f"| `{flag}" not in section] == []
