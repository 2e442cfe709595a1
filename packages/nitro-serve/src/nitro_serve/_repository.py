"""Writes a Triton model repository: a folder for each model, and in it one for each version."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from nitro.errors import BundleError, ConfigError, MissingPackageError
from nitro_export_stablehlo import Bundle, IOSpec, load_bundle

from ._config import DEFAULT_QUEUE_DELAY_US, ModelConfig, make_config
from ._kserve_types import describe

CONFIG_FILE = "config.pbtxt"
MODEL_FILE = "model.py"
ONNX_FILE = "model.onnx"


def add_bundle(
    bundle: str | Path,
    repository: str | Path,
    *,
    max_batch_size: int | None = None,
    queue_delay_us: int = DEFAULT_QUEUE_DELAY_US,
    instances: int = 1,
    kind: Literal["cpu", "gpu"] = "cpu",
    postprocess: bool = False,
    labels: Mapping[str, str | Path] | None = None,
    serves_all_versions: bool = False,
) -> Path:
    """Adds a bundle to a model repository, as the next version of the model of its name.

    The bundle is checked against its digests and copied. The version appears in whole or not
    at all, so a Triton that polls the repository never reads half of one.

    Args:
        bundle: The bundle's directory.
        repository: The repository; made where it does not exist.
        max_batch_size: The most rows of one call; default the largest compiled size.
        queue_delay_us: How long a request may wait for others to join, in microseconds.
        instances: How many copies of the model run at the same time.
        kind: Where they run, `"cpu"` or `"gpu"`.
        postprocess: Whether the bundle's post-processing module runs behind the program. It
            is code of the bundle: ask for it only where you trust who made the bundle.
        labels: For an output of scores, a text file with the name of a class on each line,
            which lets clients ask for the best classes by name.
        serves_all_versions: Whether Triton serves all versions, or only the newest.

    Returns:
        The directory of the new version, such as `models/digits_v1/2`.

    Raises:
        BundleError: A damaged bundle, or another interface than the version before has.
        ConfigError: A setting that Triton cannot use; labels for an unknown output.
    """
    source, target = Path(bundle), Path(repository)
    loaded = load_bundle(source)
    name = loaded.name
    config = make_config(
        loaded,
        name=name,
        max_batch_size=_positive("max_batch_size", max_batch_size),
        postprocess=postprocess,
        label_files={output: f"{output}.labels.txt" for output in labels or {}},
        queue_delay_us=queue_delay_us,
        instances=_positive("instances", instances),
        kind=kind,
        serves_all_versions=serves_all_versions,
    )
    if postprocess:
        loaded.load_postprocess()
    version = _next_version(target / name)
    if version > 1:
        _refuse_other_interface(loaded, target / name / str(version - 1) / name)
    with _staging(target) as folder:
        made = folder / name / str(version)
        write_version(made, name, source)
        for output, file in (labels or {}).items():
            shutil.copyfile(file, folder / name / f"{output}.labels.txt")
        (folder / name / CONFIG_FILE).write_text(config.to_text(), encoding="utf-8")
        _move_in(folder / name, target / name, version)
    return target / name / str(version)


def add_onnx(
    model: str | Path,
    repository: str | Path,
    *,
    name: str | None = None,
    max_batch_size: int = 32,
    queue_delay_us: int = DEFAULT_QUEUE_DELAY_US,
    instances: int = 1,
    kind: Literal["cpu", "gpu"] = "cpu",
) -> Path:
    """Adds an ONNX model, which Triton's `onnxruntime` backend serves without any Python.

    That backend is in the images of Triton that NVIDIA publishes, not in the wheel. Requests
    are joined where the first axis of every input and output is a free one.

    Args:
        model: The `.onnx` file; data that it keeps in other files must lie beside it.
        repository: The repository; made where it does not exist.
        name: The model's name; default the file's.
        max_batch_size: The most rows of one call.
        queue_delay_us: How long a request may wait for others to join, in microseconds.
        instances: How many copies of the model run at the same time.
        kind: Where they run, `"cpu"` or `"gpu"`.

    Returns:
        The directory of the new version.

    Raises:
        BundleError: The file is no ONNX model.
        MissingPackageError: `onnx` is not installed.
    """
    source, target = Path(model), Path(repository)
    name = name or source.stem
    inputs, outputs, external = _onnx_tensors(source)
    joins = all(shape[:1] == (-1,) and len(shape) > 1 for _, _, shape in (*inputs, *outputs))
    config = ModelConfig(
        name=name,
        backend="onnxruntime",
        max_batch_size=max_batch_size if joins else 0,
        queue_delay_us=queue_delay_us,
        instances=_positive("instances", instances),
        kind=kind,
    )
    version = _next_version(target / name)
    with _staging(target) as folder:
        made = folder / name / str(version)
        made.mkdir(parents=True)
        shutil.copyfile(source, made / ONNX_FILE)
        for file in external:
            shutil.copyfile(source.parent / file, made / file)
        (folder / name / CONFIG_FILE).write_text(config.to_text(), encoding="utf-8")
        _move_in(folder / name, target / name, version)
    return target / name / str(version)


def write_version(version: Path, name: str, bundle: Path) -> None:
    """Makes the folder of one version: the bundle under its name, and the code that runs it."""
    version.mkdir(parents=True)
    shutil.copytree(bundle, version / name)
    write_model_code(version)


def write_model_code(version: Path) -> None:
    """Writes the code that Triton's Python backend runs."""
    shutil.copyfile(Path(__file__).with_name("_triton_model.py"), version / MODEL_FILE)


def newest_version(model: Path) -> int | None:
    """The number of the newest version of a model in a repository; None where there is none."""
    if not model.is_dir():
        return None
    numbers = [int(p.name) for p in model.iterdir() if p.name.isascii() and p.name.isdecimal()]
    return max((number for number in numbers if number > 0), default=None)


def _next_version(model: Path) -> int:
    return (newest_version(model) or 0) + 1


def _refuse_other_interface(new: Bundle, before: Path) -> None:
    """Refuses a version that clients of the one before could not call."""
    if not before.is_dir():
        return
    old = load_bundle(before, verify_digests=False)
    for ours, theirs in ((new.inputs, old.inputs), (new.outputs, old.outputs)):
        if list(map(describe, ours)) != list(map(describe, theirs)):
            raise BundleError(
                f"The bundle `{new.path}` has {_listed(ours)}, and the version before has "
                f"{_listed(theirs)}.",
                expected=f"the interface of `{before.parent}`: one configuration serves all "
                "versions of a model",
                fix="export the bundle under another name",
            )


def _listed(specs: tuple[IOSpec, ...]) -> str:
    return ", ".join(f"`{spec}`" for spec in specs)


@contextmanager
def _staging(repository: Path) -> Generator[Path]:
    """A folder beside the repository: inside it, Triton would take it for a model."""
    repository.mkdir(parents=True, exist_ok=True)
    place = repository.resolve()
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as folder:
        yield Path(folder)


def _move_in(made: Path, model: Path, version: int) -> None:
    """Moves a finished version to its place; the configuration goes with the first one."""
    if not model.exists():
        made.rename(model)
        return
    for file in made.iterdir():
        if file.is_file():
            os.replace(file, model / file.name)  # noqa: PTH105 - a pair with the rename below
    (made / str(version)).rename(model / str(version))


def _positive(name: str, value: int | None) -> Any:
    if value is not None and value < 1:
        raise ConfigError(f"`{name}` is {value}.", expected="a number of at least 1")
    return value


_Tensor = tuple[str, int, tuple[int, ...]]


def _onnx_tensors(path: Path) -> tuple[list[_Tensor], list[_Tensor], list[str]]:
    """Inputs and outputs of an ONNX model as name, dtype and shape; and its external files."""
    try:
        import onnx
    except ImportError as error:
        raise MissingPackageError(
            "Reading an ONNX model needs the package `onnx`.", fix="pip install onnx"
        ) from error
    try:
        graph = onnx.load_model(path, load_external_data=False).graph
    except Exception as error:
        raise BundleError(
            f"`{path}` cannot be read as an ONNX model: {error}", expected="an `.onnx` file"
        ) from error
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [_onnx_tensor(info) for info in graph.input if info.name not in weights]
    locations = (
        entry.value
        for tensor in graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    )
    return inputs, [_onnx_tensor(info) for info in graph.output], sorted(set(locations))


def _onnx_tensor(info: object) -> _Tensor:
    tensor = info.type.tensor_type  # pyright: ignore[reportAttributeAccessIssue] - generated code
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
    return info.name, tensor.elem_type, shape  # pyright: ignore[reportAttributeAccessIssue]
