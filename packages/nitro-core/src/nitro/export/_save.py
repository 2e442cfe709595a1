"""Exports a run: checks everything, has a backend write it, and proves the artifact."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nitro._paths import local_path
from nitro._plugins import discover, get_backend
from nitro._run import Nitro, Phase, session_of
from nitro.errors import ConfigError, ExportError
from nitro.hooks import ExportBackend, VerificationRecorder

from ._build import build_program
from ._frozen import freeze
from ._program import ExportProgram
from ._request import (
    ExportRequest,
    checked_batch_sizes,
    checked_constraints,
    checked_float_dtype,
    checked_platforms,
    checked_vjp_order,
    local_platform,
)
from ._staging import staged, swap_in
from ._verify import verify_here, verify_isolated

_MAX_NAME_BYTES = 200


def export_model(
    run: Nitro,
    backend: str | ExportBackend,
    *,
    dir: str | Path,  # noqa: A002 - the word that users know
    name: str,
    batch_sizes: Sequence[int] = (1,),
    dynamic_batch: bool | None = None,
    platforms: Sequence[str] | None = None,
    dtype: Any = None,
    vjp_order: int = 0,
    constraints: Sequence[str] = (),
    custom_calls: Sequence[str] = (),
    golden: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    **backend_options: Any,
) -> Path:
    """Writes `forward` with the current weights as an artifact that needs no model source.

    The artifact is written into a temporary folder beside its target and swapped in when
    it is complete and proved: an interrupted export leaves nothing behind, killed or not.

    Args:
        run: The handle; its Device fields are baked at their current values.
        backend: The name of an installed backend, such as `"stablehlo"`; or a backend
            itself, whose artifacts are then verified in this process.
        dir: The folder that the artifact goes into.
        name: The artifact's own folder, and its name when it is served.
        batch_sizes: The sizes to compile for; each at least 1.
        dynamic_batch: Whether to write a program for any batch size, too; None is what the
            backend's attribute `dynamic_batch` says, else False. Shapes of
            `export_inputs` may hold other symbolic sizes besides: `(1, "time", 8)`.
        platforms: What to lower for, of `"cpu"`, `"cuda"`, `"rocm"` and `"tpu"`; the
            hardware need not be here. None means the platform that JAX runs on here.
        dtype: What to convert float weights to, such as `"bfloat16"`. The program
            computes in it; its inputs and outputs keep their promised dtypes.
        vjp_order: How often the artifact can be differentiated: 1 lets it be trained.
        constraints: What callers promise of symbolic sizes, such as `"b >= 2"` or
            `"mod(time, 4) == 0"`; the batch is called `b` unless a spec renames it.
        custom_calls: Targets of foreign calls to let through, though JAX does not
            promise to keep them.
        golden: Reference inputs to keep with the artifact, by wire name. None takes
            rows of the data where the wire takes those as they are, else makes some.
        provenance: More facts to keep with the artifact; they win over collected ones.
        overwrite: Whether to replace an artifact of this name.
        verify: Whether to load the artifact in a fresh process and compare it with
            `predict`.
        backend_options: The backend's own options.

    Returns:
        The artifact's path, `dir/name`.

    Raises:
        BackendError: The backend is unknown or cannot be loaded.
        ExportError: A hook is missing or its specs do not fit, the target exists, or the
            artifact does not give what `predict` gives.
        ProgramError: The hooks capture large arrays.
        ConfigError: An option that cannot be used.
    """
    writer, target, request = _prepare(
        run,
        backend,
        dir=dir,
        name=name,
        overwrite=overwrite,
        batch_sizes=batch_sizes,
        dynamic_batch=dynamic_batch,
        platforms=platforms,
        dtype=dtype,
        vjp_order=vjp_order,
        constraints=constraints,
        custom_calls=custom_calls,
        golden=golden,
        provenance=provenance,
    )
    if verify:
        _require_local_platform(request.platforms)
    session = session_of(run)
    session.refuse_other_thread()
    session.report_drift()
    with session.in_phase(Phase.EXPORTING):
        program = build_program(freeze(session), request)
        with _describe_unwritable(target), staged(target) as staging:
            _write(writer, program, staging, backend_options)
            if verify:
                _verify(writer, program, staging, is_installed=isinstance(backend, str))
            swap_in(staging, target)
    return target


def check_export(
    run: Nitro,
    backend: str | ExportBackend,
    *,
    dir: str | Path,  # noqa: A002 - the word that users know
    name: str,
    overwrite: bool = False,
    **arguments: Any,
) -> None:
    """Raises what `export_model` would raise with these arguments, and leaves nothing behind.

    For the top of a script, before the training, and for tests: the hooks, their specs, the
    options, whether the target is free, and all that the backend refuses. The weights are those
    of now: of what depends on them nothing is checked, as `predict` is not compared.

    Args:
        run: The handle, trained or not.
        backend: As for `export_model`.
        dir: As for `export_model`; it is not made.
        name: As for `export_model`.
        overwrite: Whether an artifact of this name may be there.
        arguments: The other arguments of `export_model`, the backend's own options too.

    Raises:
        BackendError: The backend is unknown or cannot be loaded.
        ExportError: A hook is missing or its specs do not fit, or the target exists.
        ProgramError: The hooks capture large arrays.
        ConfigError: An option that cannot be used.

    Example:
        At the top of a script, where what is wrong costs no training::

            run = nitro.Nitro(Digits())
            nitro.check_export(run, "stablehlo", dir="export_out", name="digits")
            run.train()
            nitro.export_model(run, "stablehlo", dir="export_out", name="digits")
    """
    known = {name: arguments.pop(name) for name in _SHAPING & arguments.keys()}
    verify = arguments.pop("verify", True)
    writer, _, request = _prepare(run, backend, dir=dir, name=name, overwrite=overwrite, **known)
    if verify:
        _require_local_platform(request.platforms)
    session = session_of(run)
    session.refuse_other_thread()
    with session.in_phase(Phase.EXPORTING), tempfile.TemporaryDirectory() as folder:
        _write(writer, build_program(freeze(session), request), Path(folder) / name, arguments)


def _prepare(
    run: Nitro,
    backend: str | ExportBackend,
    *,
    dir: str | Path,  # noqa: A002 - as `export_model` names it
    name: str,
    overwrite: bool,
    batch_sizes: Any = (1,),
    dynamic_batch: Any = None,
    platforms: Any = None,
    dtype: Any = None,
    vjp_order: Any = 0,
    constraints: Any = (),
    custom_calls: Any = (),
    golden: Any = None,
    provenance: Any = None,
) -> tuple[ExportBackend, Path, ExportRequest]:
    """The backend, the target and the request, after all that no trace is needed to refuse."""
    _check_kinds(run, backend, golden, provenance, dynamic_batch)
    target = _checked_target(dir, name, overwrite=overwrite)
    writer = get_backend(backend) if isinstance(backend, str) else backend
    request = ExportRequest(
        name=name,
        batch_sizes=checked_batch_sizes(batch_sizes),
        dynamic_batch=getattr(writer, "dynamic_batch", False)
        if dynamic_batch is None
        else dynamic_batch,
        platforms=checked_platforms(platforms),
        dtype=checked_float_dtype(dtype),
        vjp_order=checked_vjp_order(vjp_order),
        constraints=checked_constraints(constraints),
        custom_calls=(custom_calls,) if isinstance(custom_calls, str) else tuple(custom_calls),
        golden=golden,
        provenance=provenance or {},
    )
    return writer, target, request


_SHAPING = frozenset(
    (
        "batch_sizes",
        "dynamic_batch",
        "platforms",
        "dtype",
        "vjp_order",
        "constraints",
        "custom_calls",
        "golden",
        "provenance",
    )
)


@contextmanager
def _describe_unwritable(target: Path) -> Generator[None]:
    """Says of a full or read-only disk where the artifact should have gone.

    Raises:
        ExportError: The system refuses to write; nothing is left behind.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        reason = error.strerror or str(error)
        raise ExportError(
            f"`{target}` cannot be written: {reason}.",
            expected="a folder that can be written, with room for the artifact twice where it "
            "replaces another",
            fix="free the disk, or choose another `dir`; nothing of this export was left behind",
        ) from error


def _require_local_platform(platforms: Sequence[str]) -> None:
    here = local_platform()
    if here not in platforms:
        raise ConfigError(
            f"`platforms` is {tuple(platforms)}, and JAX runs on {here} here.",
            expected="a platform that the artifact can be verified on",
            fix=f'add "{here}" to `platforms`, or pass `verify=False`',
        )


def _write(
    writer: ExportBackend, program: ExportProgram, path: Path, options: Mapping[str, Any]
) -> None:
    path.mkdir()
    writer.write(program, path, **options)


def _verify(
    writer: ExportBackend, program: ExportProgram, path: Path, *, is_installed: bool
) -> None:
    found = (
        verify_isolated(program, writer.name, path)
        if is_installed
        else verify_here(program, writer.load, path)
    )
    if isinstance(writer, VerificationRecorder):
        writer.record_verification(path, found.to_json())


def _check_kinds(
    run: object, backend: object, golden: object, provenance: object, dynamic_batch: object
) -> None:
    for name, value, fits, expected in (
        ("run", run, isinstance(run, Nitro), "a handle, such as `nitro.Nitro(experiment)`"),
        (
            "backend",
            backend,
            isinstance(backend, str) or hasattr(backend, "write"),
            'the name of a backend, such as "stablehlo", or a backend',
        ),
        (
            "golden",
            golden,
            golden is None or isinstance(golden, Mapping),
            "a mapping from wire names to arrays",
        ),
        (
            "provenance",
            provenance,
            provenance is None or isinstance(provenance, Mapping),
            "a mapping from names to JSON values",
        ),
        (
            "dynamic_batch",
            dynamic_batch,
            dynamic_batch is None or isinstance(dynamic_batch, bool),
            "True, False, or None for what the backend does by itself",
        ),
    ):
        if not fits:
            raise ConfigError(f"`{name}` is {value!r}.", expected=expected)


def _checked_target(folder: str | Path, name: Any, *, overwrite: bool) -> Path:
    is_name = isinstance(name, str) and name == Path(name).name and "\0" not in name
    # The staging folder's name is some 20 bytes longer than this one.
    if not is_name or not name or name.startswith(".") or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise ConfigError(
            f"`name` is {name!r}.",
            expected="one plain folder name, such as `digits_v1`, of at most "
            f"{_MAX_NAME_BYTES} bytes",
        )
    target = local_path(folder, name="dir").absolute() / name
    for parent in target.parents:
        if parent.exists() and not parent.is_dir():
            raise ConfigError(
                f"`dir` is `{folder}`, and `{parent}` is a file.",
                expected="a folder, which is made where it is not there",
            )
    if target.exists() and not overwrite:
        raise ExportError(
            f"`{target}` exists.", fix="choose another `name`, or pass `overwrite=True`"
        )
    return target


def backends() -> dict[str, str]:
    """The installed export backends: a line about each, by name."""
    return {name: found.info.summary for name, found in discover().backends.items()}
