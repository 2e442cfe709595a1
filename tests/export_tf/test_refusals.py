"""What the backend refuses before it imports TensorFlow; none of this needs TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nitro.errors import BundleError, ConfigError, ExportError, MissingPackageError
from nitro.export import ExportProgram, ExportSpec
from nitro.hooks import ExportBackend, VerificationRecorder
from nitro_export_tf import SavedModelBackend, _plugin, load_saved_model

Make = Callable[..., ExportProgram]

_LABEL = ExportSpec("label", "int32", (1,))


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)


def _refused(program: ExportProgram, path: Path, **options: Any) -> Any:
    with pytest.raises((ConfigError, ExportError)) as refusal:
        SavedModelBackend().write(program, path, **options)
    assert list(path.iterdir()) == []
    return refusal.value


def test_plugin_offers_the_backend_tf() -> None:
    (info,) = _plugin.nitro_export_backends()
    backend = info.load()

    assert isinstance(backend, ExportBackend)
    assert isinstance(backend, VerificationRecorder)
    assert backend.name == info.name == "tf"
    assert "SavedModel" in info.summary


def test_loading_the_backend_imports_neither_tensorflow_nor_jax() -> None:
    source = Path(_plugin.__file__).parents[1]
    script = (
        f"import sys; sys.path.insert(0, {str(source)!r}); sys.modules['tensorflow'] = None\n"
        "import nitro_export_tf\n"
        "nitro_export_tf.load_saved_model, nitro_export_tf.IOSpec\n"
        "from nitro_export_tf._plugin import nitro_export_backends\n"
        "nitro_export_backends()[0].load()\n"
        "assert not {'jax', 'flax'} & set(sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr


def test_missing_tensorflow_says_how_to_install_it(mlp: Make, tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError, match="writing a SavedModel needs it") as refusal:
        SavedModelBackend().write(mlp(), tmp_path)

    assert refusal.value.fix == 'pip install "nitro-core[tf]"'
    assert list(tmp_path.iterdir()) == []


def test_unknown_option_lists_those_that_exist(mlp: Make, tmp_path: Path) -> None:
    error = _refused(mlp(), tmp_path, stablehlo_versoin="1.0.0")

    assert "no option `stablehlo_versoin`" in error.problem
    assert "did you mean `stablehlo_version`?" in error.expected


@pytest.mark.parametrize("name", ["not-a-name", "2nd", "class", "self", "_x", "__x"])
def test_input_name_that_no_signature_can_have_is_refused(
    name: str, program_of: Make, tmp_path: Path
) -> None:
    program = program_of(lambda x: (x,), {name: np.ones((4, 2), np.float32)}, ("y",))

    assert f"The input `{name}` cannot be" in _refused(program, tmp_path).problem


def test_dtype_without_an_equivalent_is_refused_by_name(program_of: Make, tmp_path: Path) -> None:
    odd = np.ones((4, 2), ml_dtypes.float8_e5m2)

    error = _refused(program_of(lambda x: (x,), {"x": odd}, ("y",)), tmp_path)

    assert "`x` has the dtype float8_e5m2" in error.problem
    assert "bfloat16" in error.expected


def test_weight_without_an_equivalent_is_refused_by_name(program_of: Make, tmp_path: Path) -> None:
    program = program_of(
        lambda x, w: (x * w.astype(x.dtype),),
        {"x": np.ones((4, 2), np.float32)},
        ("y",),
        weights={"head.scale": np.ones(2, ml_dtypes.float8_e4m3fn)},
    )

    assert (
        "The weight `head.scale` has the dtype float8_e4m3fn" in _refused(program, tmp_path).problem
    )


@pytest.mark.parametrize("side", ["input", "output"])
def test_client_specs_are_refused(side: str, mlp: Make, tmp_path: Path) -> None:
    program = mlp(postprocess="def postprocess(o): ...", **{f"client_{side}s": (_LABEL,)})

    error = _refused(program, tmp_path)

    assert f"has client {side}s (label)" in error.problem
    assert '"stablehlo"' in error.fix


def test_second_derivatives_are_refused(mlp: Make, tmp_path: Path) -> None:
    assert "`vjp_order` is 2" in _refused(mlp(vjp_order=2), tmp_path).problem


def test_training_without_a_gradient_is_refused(mlp: Make, tmp_path: Path) -> None:
    assert _refused(mlp(), tmp_path, trainable=True).fix == "pass `vjp_order=1` too"


def test_training_an_unknown_weight_is_refused(mlp: Make, tmp_path: Path) -> None:
    error = _refused(mlp(vjp_order=1), tmp_path, trainable=["dense1.kernal"])

    assert "names `dense1.kernal`" in error.problem
    assert "did you mean `dense1.kernel`?" in error.expected


def test_folder_of_another_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"has no `assets\.extra/nitro\.json`") as refusal:
        load_saved_model(tmp_path)

    assert "tf.saved_model.load" in refusal.value.fix
