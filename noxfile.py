"""The checks of the workspace: `nox -l` lists them, `nox -s tests-3.12` runs one.

Every environment is made by uv from the one lock, but for `wheels` and `lowest`, whose
point is to resolve as a user's installer would.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "imports", "types", "tests"]

ROOT = Path(__file__).parent
PYTHONS = ["3.11", "3.12", "3.13"]
FEATURES = ["loggers", "loaders", "plot", "notebook", "tf", "serve"]
"""The groups that tests skip without."""

SOURCES = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
"""All packages: their imports can be read without what they import."""


def _offer_pyenv_interpreters() -> None:
    """Makes every Python that pyenv holds runnable by name, as `python3.12`."""
    if shutil.which("pyenv") is None or "PYENV_VERSION" in os.environ:
        return
    command = ["pyenv", "versions", "--bare"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    supported = re.compile(rf"({'|'.join(map(re.escape, PYTHONS))})\.\d+")
    versions = [word for word in listed.stdout.split() if supported.fullmatch(word)]
    if versions:
        os.environ["PYENV_VERSION"] = ":".join(versions)


_offer_pyenv_interpreters()


def _sync(session: nox.Session, *options: str) -> None:
    """Installs from the lock into the session's environment."""
    session.run_install(
        "uv",
        "sync",
        "--locked",
        f"--python={session.virtualenv.location}",
        *options,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


def _groups(*names: str) -> list[str]:
    return [f"--group={name}" for name in names]


@nox.session(python=PYTHONS[0])
def lint(session: nox.Session) -> None:
    """Ruff: rules, and the format."""
    _sync(session, "--only-group=lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=PYTHONS[0])
def imports(session: nox.Session) -> None:
    """The layers, and what must not be imported where."""
    _sync(session, *_groups("lint"))
    session.run("lint-imports", env={"PYTHONPATH": SOURCES})


@nox.session(python=PYTHONS[0])
def types(session: nox.Session) -> None:
    """basedpyright, strict, on the packages."""
    _sync(session, *_groups("lint", "serve"))
    session.run("basedpyright", "--pythonpath", str(Path(session.bin) / "python"))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, with every optional package."""
    _sync(session, *_groups(*FEATURES))
    session.run("pytest", *session.posargs)


@nox.session(python=PYTHONS[0])
def core_alone(session: nox.Session) -> None:
    """The core's tests where no backend is installed."""
    requirements = Path(session.create_tmp()) / "dev.txt"
    export = ["uv", "export", "--quiet", "--locked", "--only-group=dev", "--no-hashes"]
    session.run_install(*export, f"--output-file={requirements}")
    _sync(session, "--package=nitro-core")
    session.install("--requirement", str(requirements))
    session.run("pytest", "tests/core", "tests/architecture", "packages/nitro-core")


@nox.session(python=PYTHONS)
def wheels(session: nox.Session) -> None:
    """Builds the wheels, and runs the quickstart and all tests from them."""
    empty = Path(session.create_tmp()).resolve()
    dist = empty / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run_install("uv", "build", "--all-packages", "--wheel", f"--out-dir={dist}")
    core, stablehlo, tf, serve = (
        next(dist.glob(f"{name}-*.whl"))
        for name in ("nitro_core", "nitro_export_stablehlo", "nitro_export_tf", "nitro_serve")
    )
    # By path, so that no namesake on an index can take their place.
    session.install(f"nitro-core[stablehlo] @ {core.as_uri()}", str(stablehlo), "scikit-learn")
    shutil.copy(ROOT / "examples" / "digits.py", empty)
    with session.chdir(empty):
        session.run("python", "digits.py")

    session.install("--no-deps", str(tf), str(serve))
    session.install("--group", "dev")
    session.run("pytest", "--override-ini=pythonpath=", "tests", *session.posargs)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """All tests with the oldest dependencies that the packages allow."""
    editable = [
        f"--editable={ROOT / 'packages' / f'nitro-{n}'}" for n in ("core", "export-stablehlo")
    ]
    session.install("--resolution=lowest-direct", *editable, "--group", "dev")
    session.run("pytest", *session.posargs)


@nox.session(python=PYTHONS[0])
def docs(session: nox.Session) -> None:
    """The documentation, with every broken link an error."""
    _sync(session, *_groups("docs", "lint"))  # ruff lays out the signatures
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python=PYTHONS[0])
def bench(session: nox.Session) -> None:
    """Every benchmark, one after the other."""
    _sync(session, *_groups("tf"))
    for benchmark in sorted((ROOT / "benchmarks").glob("*.py")):
        if benchmark.name == "peers.py":
            continue  # runs in interpreters of its own, which `train_step.py` is given
        session.run("python", str(benchmark), *session.posargs)
