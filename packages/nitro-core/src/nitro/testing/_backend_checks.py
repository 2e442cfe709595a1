"""What every export backend must pass, whoever wrote it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nitro._plugins import get_backend
from nitro._run import Nitro
from nitro.errors import BundleError, ConfigError, ExportError, NitroError
from nitro.export import export_model
from nitro.hooks import ExportBackend, LoadedArtifact

from ._scenes import Scenes

_RTOL = 1e-5


def check_backend(backend: str | ExportBackend) -> tuple[str, ...]:
    """Exports a tiny trained model through a backend, and checks what Nitro promises of it.

    Checks the round trip; parity with `predict` at compiled sizes and beside them; a
    dynamic batch, or its refusal; refusals of unknown options and of requests that do not
    fit; that nothing is written outside the folder, and an artifact replaced as a whole;
    that provenance comes back; and batch axes other than the first.

    Args:
        backend: The name of an installed backend, whose artifacts are then also loaded
            in a fresh process; or a backend itself.

    Returns:
        The names of the checks, all passed.

    Raises:
        AssertionError: A check fails; names it and says what was expected.

    Example:
        >>> def test_backend():
        ...     nitro.testing.check_backend("npz")
    """
    with tempfile.TemporaryDirectory(prefix="nitro-check-") as name:
        bench = _Bench(backend, Path(name))
        checks: dict[str, Callable[[_Bench], None]] = {
            "round trip": _check_round_trip,
            "parity": _check_parity,
            "axes": _check_axes,
            "dynamic batch": _check_dynamic_batch,
            "refusals": _check_refusals,
            "atomicity": _check_atomicity,
            "provenance": _check_provenance,
        }
        for check, run in checks.items():
            try:
                run(bench)
            except AssertionError:
                raise
            # A backend under test raises anything.
            except Exception as error:
                raise AssertionError(
                    f"`{bench.name}` fails the check of {check}: {type(error).__name__}: {error}"
                ) from error
        return tuple(checks)


class _Bench:
    """A trained run, and its artifact, which is written once for most checks."""

    def __init__(self, backend: str | ExportBackend, folder: Path) -> None:
        self.backend = backend
        self.loader = get_backend(backend) if isinstance(backend, str) else backend
        self.folder = folder
        self.run = Nitro(Scenes(), run_dir=folder / "run", checkpointer=None, progress=False)
        self.run.train()
        self.path = self.export("scenes_v1", batch_sizes=(1, 4))
        self.artifact: LoadedArtifact = self.loader.load(self.path)

    @property
    def name(self) -> str:
        return self.loader.name

    def export(self, name: str, **options: Any) -> Path:
        options = {"provenance": {"ticket": "T-7"}, **options}
        return export_model(self.run, self.backend, dir=self.folder / "out", name=name, **options)

    def expected(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        pixels = rows["pixels"].astype(np.float32) / 255
        outputs = self.run.predict({"img": pixels, "light": rows["light"].T})
        return {
            "logits": outputs["logits"],
            "best": outputs["verdict"]["best"],
            "sure": outputs["verdict"]["sure"],
            "light": rows["light"],
        }

    def require(self, holds: bool, check: str, problem: str, expected: str) -> None:  # noqa: FBT001 - reads as an assertion
        if not holds:
            raise AssertionError(
                f"`{self.name}` fails the check of {check}: {problem}\n  expected: {expected}"
            )


def _request(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    return {
        "pixels": rng.integers(0, 256, (rows, 6, 6, 1), dtype=np.uint8),
        "light": rng.uniform(size=(3, rows)).astype(np.float32),
    }


def _check_round_trip(bench: _Bench) -> None:
    outputs = bench.artifact(**_request(4))
    names = ["logits", "best", "sure", "light"]
    bench.require(
        sorted(outputs) == sorted(names),
        "round trip",
        f"the outputs are {sorted(outputs)}.",
        f"{sorted(names)}, as `export_outputs` names them",
    )
    wanted = bench.expected(_request(4))
    for name in names:
        array = np.asarray(outputs[name])
        bench.require(
            array.dtype == wanted[name].dtype,
            "round trip",
            f"`{name}` has the dtype {array.dtype}.",
            str(wanted[name].dtype),
        )


def _check_parity(bench: _Bench) -> None:
    for rows in (1, 4, 2, 3, 5, 11):
        _compare(bench, bench.artifact, rows, "parity")


def _check_axes(bench: _Bench) -> None:
    light = _request(3)["light"]
    echoed = np.asarray(bench.artifact(**_request(3))["light"])
    bench.require(
        echoed.shape == light.shape and np.array_equal(echoed, light),
        "axes",
        f"the echoed input has the shape {echoed.shape}.",
        f"{light.shape}, unchanged: its batch axis is the second one",
    )


def _check_dynamic_batch(bench: _Bench) -> None:
    try:
        path = bench.export("dynamic_v1", dynamic_batch=True, verify=False)
    except ExportError as error:
        bench.require(
            not (bench.folder / "out" / "dynamic_v1").exists(),
            "dynamic batch",
            f"it refused with {str(error)!r}, and left an artifact.",
            "nothing where it refuses",
        )
        return
    artifact = bench.loader.load(path)
    for rows in (1, 3, 8, 17):
        _compare(bench, artifact, rows, "dynamic batch")


def _check_refusals(bench: _Bench) -> None:
    _expect(bench, ConfigError, "an unknown option", lambda: bench.export("x_v1", no_such_option=1))
    request = _request(4)
    pixels = request["pixels"]
    wrong: dict[str, dict[str, np.ndarray]] = {
        "a missing input": {"pixels": pixels},
        "an unknown input": {**request, "extra": pixels},
        "an input of another dtype": {**request, "pixels": pixels.astype(np.float32)},
        "an input of another shape": {**request, "pixels": pixels[:, :5]},
        "inputs with different numbers of rows": {**request, "pixels": pixels[:2]},
    }
    for what, inputs in wrong.items():
        _expect(bench, BundleError, what, lambda inputs=inputs: bench.artifact(**inputs))


def _check_atomicity(bench: _Bench) -> None:
    out = bench.folder / "out"
    before = sorted(path.name for path in out.iterdir())
    _expect(bench, ExportError, "a name that is taken", lambda: bench.export("scenes_v1"))
    bench.run.set_device(sharpness=-2.0)
    bench.export("scenes_v1", batch_sizes=(1, 4), overwrite=True, verify=False)
    after = sorted(path.name for path in out.iterdir())
    bench.require(
        before == after,
        "atomicity",
        f"the folder holds {after} after an overwrite.",
        f"{before}: `write` writes into `path` alone",
    )
    bench.artifact = bench.loader.load(bench.path)
    _compare(bench, bench.artifact, 4, "atomicity")


def _check_provenance(bench: _Bench) -> None:
    found = dict(bench.artifact.provenance)
    for key, value in {"ticket": "T-7", "dataset": "scenes", "experiment": "Scenes"}.items():
        bench.require(
            found.get(key) == value,
            "provenance",
            f"`load(path).provenance` has {found.get(key)!r} under {key!r}.",
            f"{value!r}, as `program.provenance` has it",
        )


def _compare(bench: _Bench, artifact: LoadedArtifact, rows: int, check: str) -> None:
    request = _request(rows)
    got, expected = artifact(**request), bench.expected(request)
    for name, wanted in expected.items():
        array = np.asarray(got[name])
        bench.require(
            array.shape == wanted.shape
            and np.allclose(
                array.astype(np.float64), wanted.astype(np.float64), rtol=_RTOL, atol=_RTOL
            ),
            check,
            f"for {rows} rows, `{name}` of shape {array.shape} is not what `predict` gives.",
            f"the shape {wanted.shape}, and values within {_RTOL}",
        )


def _expect(bench: _Bench, kind: type[NitroError], what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    # What it raises instead is what the author has to see.
    except Exception as error:  # noqa: BLE001
        problem, cause = f"{what} raised {type(error).__name__}: {error}", error
    else:
        problem, cause = f"{what} was taken.", None
    raise AssertionError(
        f"`{bench.name}` fails the check of refusals: {problem}\n"
        f"  expected: `nitro.errors.{kind.__name__}`"
    ) from cause
