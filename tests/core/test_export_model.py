from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import Device, ExportSpec, export_model
from nitro._plugins import discover
from nitro.errors import BackendError, ConfigError, ExportError, HookError, NitroWarning
from nitro.export._provenance import _git_facts

SCALE = 1.0

PLUGIN = '''
"""A backend that keeps the exported programs of JAX and the weights as they are."""

import json

import jax
import numpy as np

from nitro.hooks import BackendInfo, hookimpl


class PlainBackend:
    name = "plain"

    def write(self, program, path, *, spoil=False, fail=False):
        (path / "half").write_text("written")
        if fail:
            raise OSError("disk full")
        for size in program.batch_sizes:
            (path / f"b{size}.jax").write_bytes(program.exported(size).serialize())
        weights = {n: np.asarray(program.weights[n]) + spoil for n in program.weight_names}
        np.savez(path / "weights.npz", **weights)
        names = {
            "inputs": [spec.name for spec in program.inputs],
            "outputs": [[s.name, s.dtype, s.shape] for s in program.outputs],
            "sizes": program.batch_sizes,
            "weights": program.weight_names,
            "provenance": program.provenance,
        }
        (path / "names.json").write_text(json.dumps(names))

    def load(self, path):
        names = json.loads((path / "names.json").read_text())
        with np.load(path / "weights.npz") as file:
            weights = [file[name] for name in names["weights"]]
        size = names["sizes"][-1]
        program = jax.export.deserialize((path / f"b{size}.jax").read_bytes())

        def run(**inputs):
            arrays = [inputs[name] for name in names["inputs"]]
            rows = arrays[0].shape[0]
            padded = [np.concatenate([a, np.repeat(a[-1:], size - rows, 0)]) for a in arrays]
            outputs = program.call(*padded, *weights)
            named = zip(names["outputs"], outputs, strict=True)
            return {name: np.asarray(value)[:rows] for (name, *_), value in named}

        return run


@hookimpl
def nitro_export_backends():
    return [BackendInfo(name="plain", summary="Plain.", load=PlainBackend)]
'''


@pytest.fixture(autouse=True)
def _plain_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a third-party backend `plain` for this process and those that it starts."""
    site = tmp_path / "site"
    metadata = site / "nitro_plain-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nitro-plain\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nitro]\nplain = nitro_plain\n")
    (site / "nitro_plain.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(site))
    discover.cache_clear()
    yield
    discover.cache_clear()
    sys.modules.pop("nitro_plain", None)


@pytest.fixture
def export(tmp_path: Path) -> Any:
    """Exports with the backend `plain`; what proves the artifact cannot see that backend."""

    def call(run: nitro.Nitro, **options: Any) -> Path:
        defaults: dict[str, Any] = {"dir": tmp_path / "out", "name": "v1", "verify": False}
        return export_model(run, "plain", **{**defaults, "batch_sizes": (4,), **options})

    return call


@pytest.fixture
def exported(plane: Any, make_run: Any, export: Any) -> Any:
    """Exports an untrained plane with hooks replaced; returns the handle and what was written."""

    def call(**hooks: Any) -> tuple[nitro.Nitro, Any, Any]:
        run = make_run(type("Changed", (plane,), hooks)())
        path = export(run)
        names = json.loads((path / "names.json").read_text())
        return run, nitro._plugins.get_backend("plain").load(path), names

    return call


def test_artifact_computes_what_predict_does(exported: Any, points: Any) -> None:
    run, loaded, names = exported()
    x = points(3, seed=0)["x"]

    assert names["outputs"] == [["height", "float32", [4]]]
    assert names["weights"] == ["bias", "kernel"]
    np.testing.assert_allclose(loaded(x=x)["height"], run.predict({"x": x}), atol=1e-6)


def test_preprocessing_ships_inside_the_program(exported: Any) -> None:
    run, loaded, _ = exported(
        export_inputs=lambda self: [ExportSpec("pixels", "uint8", (1, 4))],
        export_preprocess=lambda self, pixels: {"x": pixels.astype("float32") / 255},
    )
    pixels = np.arange(8, dtype=np.uint8).reshape(2, 4) * 30

    height = run.predict({"x": pixels.astype(np.float32) / 255})

    np.testing.assert_allclose(loaded(pixels=pixels)["height"], height, atol=1e-6)


@jax.jit
def _scaled(x: Any) -> Any:
    return SCALE * x


def test_trace_that_jax_remembers_is_not_exported_after_a_change(
    plane: Any, make_run: Any, export: Any, points: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return _scaled(model(x)[:, 0])

        def export_preprocess(self, x: Any) -> Any:
            return {"x": _scaled(x)}

    x = points(3, seed=0)["x"]

    def heights(name: str) -> Any:
        path = export(make_run(Scaled()), name=name)
        return nitro._plugins.get_backend("plain").load(path)(x=x)["height"]

    before = heights("v1")
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)

    np.testing.assert_allclose(heights("v2"), 4 * before, rtol=1e-6)


def test_wire_may_be_64_bit(exported: Any) -> None:
    run, loaded, _ = exported(
        export_inputs=lambda self: [ExportSpec("tokens", "int64", (1, 4))],
        export_preprocess=lambda self, tokens: {"x": tokens.astype("float32")},
    )
    with jax.enable_x64(True):
        height = loaded(tokens=np.ones((2, 4), np.int64))["height"]

    expected = run.predict({"x": np.ones((2, 4), np.float32)})
    np.testing.assert_allclose(height, expected, atol=1e-6)


def test_outputs_are_renamed_selected_and_echoed(exported: Any, points: Any) -> None:
    _, loaded, names = exported(
        forward=lambda self, model, *, x: {"a": model(x)[:, 0], "b": {"c": x * 2}, "unused": x},
        loss=lambda self, outputs, *, y: outputs["a"].mean(),
        export_outputs=lambda self: [
            ExportSpec("double", source="b.c"),
            ExportSpec("a", "float32", (1,)),
            ExportSpec("x", source="x"),
        ],
    )
    x = points(3, seed=0)["x"]

    outputs = loaded(x=x)

    assert [name for name, *_ in names["outputs"]] == ["double", "a", "x"]
    np.testing.assert_array_equal(outputs["double"], x * 2)
    np.testing.assert_array_equal(outputs["x"], x)


def test_batch_axis_may_be_another_on_the_wire(exported: Any, points: Any) -> None:
    _, _, names = exported(
        forward=lambda self, model, *, x: {"out": model(x)},
        loss=lambda self, outputs, *, y: outputs["out"].mean(),
        export_inputs=lambda self: [ExportSpec("x", "float32", (4, 1), batch_axis=2)],
        export_outputs=lambda self: [ExportSpec("out", batch_axis=2)],
    )

    assert names["outputs"] == [["out", "float32", [1, 4]]]


def test_device_fields_and_rng_state_are_no_weights(
    images: Any, make_run: Any, export: Any
) -> None:
    class Scaled(images):
        scale: Device[float] = 3.0

        def forward(self, model: Any, *, img: Any) -> Any:
            return {"logits": self.scale * model(img)}

    path = export(make_run(Scaled()))

    modules = {"conv": ("bias", "kernel"), "head": ("bias", "kernel")}
    modules["norm"] = ("bias", "mean", "scale", "var")
    expected = [f"{module}.{name}" for module, names in modules.items() for name in names]
    assert json.loads((path / "names.json").read_text())["weights"] == expected


def test_provenance_tells_configuration_and_versions(
    plane: Any, trained_plane: nitro.Nitro, export: Any
) -> None:
    path = export(trained_plane, provenance={"ticket": 7, "seed": "overruled"})

    facts = json.loads((path / "names.json").read_text())["provenance"]

    assert facts["experiment"] == "Plane"
    assert (facts["step"], facts["epoch"], facts["config"]) == (24, 6, {})
    assert facts["jax_version"] == jax.__version__
    assert facts["metrics"]["val_loss"] == trained_plane.history[6]["val_loss"]
    assert (facts["ticket"], facts["seed"]) == (7, "overruled")


def test_provenance_names_the_run_that_trained(plane: Any, make_run: Any, export: Any) -> None:
    class Paged(nitro.JSONLinesLogger):
        def run_url(self) -> str:
            return "http://tracker/7"

    trained = make_run(plane(), logger=Paged()).train()
    restored = nitro.Nitro(plane(), checkpoint=trained.run_dir, data={}, logger=None)

    for run in (trained, restored):
        facts = json.loads((export(run, overwrite=True) / "names.json").read_text())["provenance"]
        assert (facts["run_id"], facts["run_url"]) == (trained.run_id, "http://tracker/7")


@pytest.fixture
def repository(tmp_path: Path) -> Any:
    """Runs git on a repository with one commit of `mine.py`."""
    source = tmp_path / "repository" / "mine.py"
    source.parent.mkdir()
    source.write_text("width = 1\n")

    def git(*words: str | bytes) -> str:
        command = ["git", "-C", str(source.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run([*command, *words], check=True, capture_output=True)
        return done.stdout.decode().strip()

    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        git(*words)
    return source, git


def test_provenance_names_the_commit_and_keeps_the_patch(repository: Any) -> None:
    source, git = repository
    source.write_text("width = 2\n")

    facts, patch = _git_facts(source.parent)

    assert facts["git_commit"] == git("rev-parse", "HEAD")
    assert facts["git_dirty"] is True
    assert patch is not None
    assert b"-width = 1\n+width = 2\n" in patch


def test_patch_that_is_too_large_is_left_out_and_told(repository: Any) -> None:
    source, _ = repository
    source.write_text("x" * (20 * 2**20))

    with pytest.warns(NitroWarning, match=r"a patch of 20,9\d\d,\d{3} bytes[\s\S]*commit them"):
        facts, patch = _git_facts(source.parent)

    assert patch is None
    assert facts["git_dirty"] is True


def test_patch_applies_however_the_user_looks_at_differences(
    repository: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, git = repository
    source.write_text("width = 2\n")
    for key, value in (
        ("diff.external", "echo"),
        ("diff.noprefix", "true"),
        ("color.ui", "always"),
    ):
        git("config", key, value)
    # As in a hook of another repository.
    monkeypatch.setenv("GIT_DIR", "/nonexistent")

    _, patch = _git_facts(source.parent)
    monkeypatch.delenv("GIT_DIR")
    git("checkout", "-q", ".")
    (source.parent / "x.patch").write_bytes(patch or b"")
    git("apply", "x.patch")

    assert source.read_text() == "width = 2\n"


@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://me:secret@host.org/x.git", "https://host.org/x.git"),
        ("https://secret@host.org:8443/x.git", "https://host.org:8443/x.git"),
        ("ssh://git:secret@host.org/x.git", "ssh://git@host.org/x.git"),
        ("git@host.org:me/x.git", "git@host.org:me/x.git"),
        ("https://host.org:8443/a@b.git", "https://host.org:8443/a@b.git"),
        ("/srv/x.git", "/srv/x.git"),
    ],
)
def test_provenance_tells_no_password(repository: Any, remote: str, shown: str) -> None:
    source, git = repository
    git("remote", "add", "origin", remote)

    facts, _ = _git_facts(source.parent)

    assert facts["repo_remote"] == shown


def test_git_facts_that_cannot_be_had_are_left_out(repository: Any) -> None:
    source, git = repository
    git("checkout", "-q", "-b", b"br\xe9")
    (source.parent / ".git" / "index").write_bytes(b"damaged")

    facts, patch = _git_facts(source.parent)

    assert facts["git_branch"] == "br\ufffd"
    assert "git_dirty" not in facts
    assert patch is None


@pytest.mark.parametrize("hook", ["export_inputs", "export_outputs"])
def test_missing_export_hook_is_named(plane: Any, make_run: Any, export: Any, hook: str) -> None:
    hooks = ("build_data", "build_model", "forward", "loss", "export_inputs", "export_outputs")
    body = {name: getattr(plane, name) for name in hooks if name != hook}
    bare = type("Bare", (nitro.Experiment,), body)

    with pytest.raises(ExportError, match=rf"`Bare` has no `{hook}`[\s\S]*`def {hook}\(self\)"):
        export(make_run(bare()))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], r"export_inputs` returned \[\]"),
        (5, "returned 5"),
        (["x"], r"a list with 'x'[\s\S]*ExportSpec objects"),
        ([ExportSpec("x", "uint8", (1, 4))] * 2, "names `x` twice"),
        ([ExportSpec("x", "float32")], r"`x` has no shape[\s\S]*\(1, 64\)"),
        ([ExportSpec("x", shape=(1, 4))], "`x` has no dtype"),
        ([ExportSpec("x", "float32", (1, 4), source="y")], r"the source `y`[\s\S]*preprocess"),
        ([ExportSpec("x", "float32", (1, 5))], r"cannot take[\s\S]*`x` float32\(1, 5\)"),
        (
            [ExportSpec("z", "float32", (1, 4))],
            r"wants the batch field `x`, .*export_inputs` has `z`[\s\S]*promise it there",
        ),
    ],
)
def test_inputs_that_cannot_be_promised_are_refused(exported: Any, inputs: Any, words: str) -> None:
    with pytest.raises((ExportError, nitro.errors.DataError), match=words):
        exported(export_inputs=lambda self: inputs)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (
            [ExportSpec("c"), ExportSpec("d")],
            r"`c` asks for `c`, which `Changed\.forward` does not",
        ),
        ([ExportSpec("hight")], r"did you mean `height`[\s\S]*source=\"height\""),
        ([ExportSpec("x")], r"`x` has the name of a wire input[\s\S]*source=\"x\""),
        ([ExportSpec("height", "float64")], r"dtype float32[\s\S]*float64, as its ExportSpec says"),
        ([ExportSpec("height", shape=(1, 2))], r"the shape \(4,\)[\s\S]*\(4, 2\), as its"),
        ([ExportSpec("mean")], r"`mean` has the shape \(1,\) at batch size 4 and \(1,\) at 5"),
        ([ExportSpec("height", batch_axis=2)], "."),
    ],
)
def test_outputs_that_forward_does_not_give_are_refused(
    exported: Any, outputs: Any, words: str
) -> None:
    with pytest.raises(ExportError, match=words):
        exported(
            forward=lambda self, model, *, x: {
                "height": model(x)[:, 0],
                "mean": model(x).mean(keepdims=True)[0],
            },
            loss=lambda self, outputs, *, y: outputs["height"].mean(),
            export_outputs=lambda self: outputs,
        )


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([ExportSpec("a"), ExportSpec("b")], r"returns one array, .*promises `a` and `b`"),
        ([ExportSpec("a", source="nope")], r"asks for `nope`.*one array, which has no name"),
    ],
)
def test_one_unnamed_array_is_one_output(exported: Any, outputs: Any, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        exported(export_outputs=lambda self: outputs)


def test_tuple_of_outputs_is_refused(exported: Any) -> None:
    with pytest.raises(HookError, match=r"returned tuple[\s\S]*name the outputs"):
        exported(forward=lambda self, model, *, x: (model(x), x))


def test_preprocess_that_returns_no_batch_is_refused(exported: Any) -> None:
    with pytest.raises(ExportError, match=r"export_preprocess` returned \w+[\s\S]*batch fields"):
        exported(export_preprocess=lambda self, x: x)


@pytest.mark.parametrize(
    ("preprocess", "words"),
    [
        (
            lambda self, a: {"x": a},
            r"export_preprocess\(a\)` cannot take the 2 inputs `a`, `b`[\s\S]*\(self, a, b\)",
        ),
        (lambda self, a, b, c: {"x": a}, "cannot take the 2 inputs `a`, `b`: missing .*'c'"),
        (lambda self, b, a: {"x": b}, "would get the input `a` as `b`"),
        (lambda self, a, b: {"z": a}, "field `x`, but `Changed.export_preprocess` has `z`"),
    ],
)
def test_preprocess_that_does_not_fit_the_inputs_is_refused(
    exported: Any, preprocess: Any, words: str
) -> None:
    inputs = [ExportSpec(name, "float32", (1, 4)) for name in "ab"]

    with pytest.raises(ExportError, match=words):
        exported(export_inputs=lambda self: inputs, export_preprocess=preprocess)


@pytest.mark.parametrize(
    "preprocess", [lambda self, *wire: {"x": wire[0]}, lambda self, left, right, k=1: {"x": left}]
)
def test_preprocess_may_name_its_arguments_as_it_likes(
    exported: Any, points: Any, preprocess: Any
) -> None:
    inputs = [ExportSpec(name, "float32", (1, 4)) for name in "ab"]

    run, loaded, _ = exported(export_inputs=lambda self: inputs, export_preprocess=preprocess)
    x = points(3, seed=0)["x"]

    height = loaded(a=x, b=0 * x)["height"]
    np.testing.assert_allclose(height, run.predict({"x": x}), atol=1e-6)


# Setup warns of it already.
@pytest.mark.filterwarnings("ignore:.*draws random numbers in evaluation mode")
def test_draw_in_evaluation_mode_is_refused(exported: Any) -> None:
    def build_model(self: Any, rngs: nnx.Rngs) -> Any:
        model = nnx.Linear(4, 1, rngs=rngs)
        model.noise = rngs.fork()
        return model

    def forward(self: Any, model: Any, *, x: Any) -> Any:
        return model(x)[:, 0] + jax.random.normal(model.noise(), x.shape[:1])

    with pytest.raises(ExportError, match=r"draws random numbers in evaluation[\s\S]*`noise\."):
        exported(build_model=build_model, forward=forward)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sizes": ()}, "at least one size"),
        ({"batch_sizes": (1, 0)}, r"`batch_sizes` is \(1, 0\)"),
        ({"batch_sizes": (1.5,)}, "each at least 1"),
        ({"name": ""}, "plain folder name"),
        ({"name": "a/b"}, "`name` is 'a/b'"),
        ({"name": ".."}, "`name` is '..'"),
    ],
)
def test_option_that_cannot_be_used_is_refused(
    trained_plane: nitro.Nitro, export: Any, options: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        export(trained_plane, **options)


def test_unknown_backend_lists_the_installed_ones(
    trained_plane: nitro.Nitro, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match=r"no export backend `plian`[\s\S]*mean `plain`\?"):
        export_model(trained_plane, "plian", dir=tmp_path, name="v1")


def test_existing_target_is_kept_unless_overwriting(
    trained_plane: nitro.Nitro, export: Any
) -> None:
    path = export(trained_plane)
    (path / "mine").write_text("kept")

    with pytest.raises(ExportError, match=r"v1` exists[\s\S]*overwrite=True"):
        export(trained_plane)
    kept = (path / "mine").exists()
    export(trained_plane, overwrite=True)

    assert kept
    assert not (path / "mine").exists()
    assert [item.name for item in path.parent.iterdir()] == ["v1"]


def test_failed_export_leaves_nothing_behind_and_the_old_one_in_place(
    trained_plane: nitro.Nitro, export: Any, tmp_path: Path
) -> None:
    path = export(trained_plane)

    with pytest.raises(OSError, match="disk full"):
        export(trained_plane, fail=True, overwrite=True)
    with pytest.raises(OSError, match="disk full"):
        export(trained_plane, fail=True, name="v2")

    assert sorted(path.parent.iterdir()) == [path]
    assert (path / "weights.npz").exists()


def test_artifact_is_proved_in_a_process_without_the_callers_path(
    trained_plane: nitro.Nitro, export: Any, tmp_path: Path
) -> None:
    # `plain` lies on this process's path only: an isolated process cannot load it.
    with pytest.raises(ExportError, match=r"does not run in a fresh process[\s\S]*`plain`"):
        export(trained_plane, verify=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        (lambda out: out - out.mean(0), r"differs by \d"),
        (lambda out: out / (out - out.mean(0)), "has infinities or NaNs"),
    ],
)
def test_artifact_that_gives_something_else_is_refused(
    plane: Any, make_run: Any, tmp_path: Path, mix: Any, words: str
) -> None:
    pytest.importorskip("nitro_export_stablehlo")

    class Mixed(plane):
        def forward(self, model: Any, *, x: Any) -> Any:
            return mix(model(x)[:, 0])

    with pytest.raises(
        ExportError, match=rf"`height` of the written artifact.* {words}[\s\S]*on its own"
    ):
        export_model(make_run(Mixed()), "stablehlo", dir=tmp_path / "out", name="v1")
    assert list((tmp_path / "out").iterdir()) == []


def test_stablehlo_bundle_passes_its_proof(
    trained_plane: nitro.Nitro, tmp_path: Path, points: Any
) -> None:
    loader = pytest.importorskip("nitro_export_stablehlo")

    path = export_model(trained_plane, "stablehlo", dir=tmp_path, name="v1", batch_sizes=(1, 8))

    x = points(11, seed=4)["x"]
    np.testing.assert_allclose(
        loader.load_bundle(path)(x=x)["height"], trained_plane.predict({"x": x}), atol=1e-6
    )


def test_export_may_be_checked_before_the_training(
    plane: Any, make_run: Any, export: Any, tmp_path: Path
) -> None:
    run = make_run(plane())
    arguments: dict[str, Any] = {"dir": tmp_path / "out", "name": "v1", "batch_sizes": (4,)}

    nitro.check_export(run, "plain", **arguments)

    assert not (tmp_path / "out").exists()
    assert (run.phase.value, run.step) == ("ready", 0)
    export(run.train())
    with pytest.raises(ExportError, match=r"v1` exists\.[\s\S]*overwrite=True"):
        nitro.check_export(run, "plain", **arguments)
    nitro.check_export(run, "plain", **arguments, overwrite=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sizes": (0,)}, "`batch_sizes` is"),
        ({"name": "a/b"}, "`name` is 'a/b'"),
        ({"fail": True}, "disk"),
    ],
)
def test_check_refuses_what_the_export_would(
    plane: Any, make_run: Any, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    given = {"dir": tmp_path / "out", "name": "v1", **arguments}

    with pytest.raises(Exception, match=message):
        nitro.check_export(make_run(plane()), "plain", **given)
    assert not (tmp_path / "out").exists()
