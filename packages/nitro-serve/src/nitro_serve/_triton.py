"""Finds a Triton server and starts it on a model repository."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nitro.errors import ConfigError, MissingPackageError

PROGRAM = "tritonserver"
WHEEL = "nvidia-pytriton"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command, and the environment variables that it needs besides those that are set.

    Attributes:
        command: The program and its arguments.
        variables: Environment variables by name.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str]

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " \\\n  ".join([*settings, *map(shlex.quote, self.command)])

    def run(self) -> None:
        """Becomes the server: this process is replaced, so that signals reach it."""
        os.execvpe(self.command[0], self.command, {**os.environ, **self.variables})


def plan_launch(
    repository: Path,
    *,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    control: bool,
    poll_s: int | None,
    extra: Sequence[str] = (),
) -> Launch:
    """Works out how to start Triton on a repository.

    Args:
        repository: The model repository.
        host: The address to listen on.
        http_port: The port of the REST interface.
        grpc_port: The port of the gRPC interface.
        metrics_port: The port of Prometheus metrics.
        control: Whether clients may load and unload models.
        poll_s: Every how many seconds the repository is looked at for new versions; None for
            never.
        extra: Further arguments for Triton.

    Raises:
        ConfigError: The repository is not there, or both `control` and `poll_s` are given.
        MissingPackageError: There is no Triton, on the PATH or as a package.
    """
    if not repository.is_dir():
        raise ConfigError(
            f"`{repository}` is not a directory.",
            expected="a model repository",
            fix=f"nitro-serve repository BUNDLE --to {repository}",
        )
    if control and poll_s is not None:
        raise ConfigError(
            "Both --control and --poll were given.",
            expected="one of them: either clients say what is loaded, or the folder does",
        )
    program, variables = _find()
    if control:
        mode = ["--model-control-mode=explicit", "--load-model=*"]
    elif poll_s is not None:
        mode = ["--model-control-mode=poll", f"--repository-poll-secs={poll_s}"]
    else:
        mode = ["--model-control-mode=none"]
    command = [
        *program,
        f"--model-repository={repository.resolve()}",
        f"--http-address={host}",
        f"--grpc-address={host}",
        f"--metrics-address={host}",
        f"--http-port={http_port}",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics_port}",
        # One broken model keeps no other from being served.
        "--exit-on-error=false",
        "--strict-readiness=false",
        *mode,
        *extra,
    ]
    return Launch(command=tuple(command), variables=variables)


def _find() -> tuple[list[str], dict[str, str]]:
    """The program with what it needs to be told, and its environment."""
    site = os.pathsep.join(dict.fromkeys(p for p in sys.path if p.endswith("-packages")))
    on_path = shutil.which(PROGRAM)
    if on_path is not None:
        return [on_path], {"NITRO_SERVE_SITE": site}
    package = importlib.util.find_spec("pytriton")
    if package is None or not package.submodule_search_locations:
        raise MissingPackageError(
            f"There is no `{PROGRAM}` on the PATH, and the package {WHEEL} is not installed.",
            expected="a Triton Inference Server",
            fix=f"pip install --no-deps {WHEEL}  (it pins NumPy 1 for an API that is not used "
            "here), or run this in an image of Triton",
        )
    root = Path(package.submodule_search_locations[0])
    libraries = [str(sysconfig.get_config_var("LIBDIR")), str(root.parent / "nvidia_pytriton.libs")]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    variables = {
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *([inherited] if inherited else [])]),
        "NITRO_SERVE_SITE": site,
    }
    backends = _backends_of_wheel(root / PROGRAM)
    return [str(root / PROGRAM / "bin" / PROGRAM), f"--backend-directory={backends}"], variables


def _backends_of_wheel(server: Path) -> Path:
    """A backend directory with the stub of this Python beside the backend, where it is looked for.

    The wheel has a stub for each Python, elsewhere, and its own launcher copies one. Kept in
    the user's cache, by the wheel's version.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise MissingPackageError(
            f"{WHEEL} has no stub for Python {python}.",
            expected="one of " + ", ".join(sorted(p.name for p in stub.parent.parent.iterdir())),
            fix="run nitro-serve in one of those",
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = importlib.metadata.version(WHEEL)
    backends = cache / "nitro-serve" / f"triton-{version}-py{python}"
    python_backend = backends / "python"
    python_backend.mkdir(parents=True, exist_ok=True)
    for file in (*(server / "backends" / "python").iterdir(), stub):
        target = python_backend / file.name
        if not target.exists() or target.stat().st_size != file.stat().st_size:
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy(file, partial)
            partial.replace(target)
    return backends
