"""What the export hooks may promise, and what of it is refused; with a backend in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nitro
from nitro import ExportSpec
from nitro.errors import ConfigError, ExportError, HookError
from nitro.export import ExportProgram
from nitro.export._lowering import export_traced
from nitro.testing import Scenes, make_scenes


class Memory:
    """Keeps the program, and runs it without writing more than its name."""

    name = "memory"
    provenance: Mapping[str, Any] = {}

    def write(self, program: ExportProgram, path: Path, **options: Any) -> None:
        self.program, self.options = program, options
        (path / "name").write_text(program.name)

    def load(self, path: Path) -> Memory:
        assert (path / "name").read_text() == self.program.name
        return self

    def __call__(self, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        weights = [self.program.weights[name] for name in self.program.weight_names]
        wire = [inputs[spec.name] for spec in self.program.inputs]
        results = jax.jit(self.program.fn)(*wire, *weights)
        return dict(zip((s.name for s in self.program.outputs), results, strict=True))

    def record_verification(self, path: Path, verification: Mapping[str, Any]) -> None:
        assert (path / "name").exists()
        self.verification = verification


class Held:
    """Keeps what a hook shall return out of the logged configuration."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _of(experiment: type[Wires], inputs: Any, outputs: Any, extra: Any = None) -> Wires:
    return experiment(inputs=Held(inputs), outputs=Held(outputs), extra=Held(extra))


class Wires(nitro.Experiment):
    """Hands its hooks' results over from outside."""

    inputs: Any
    outputs: Any
    extra: Any

    def build_data(self):
        return {}

    def build_model(self, rngs: nnx.Rngs):
        return nnx.Linear(4, 2, rngs=rngs)

    def loss(self, outputs, *, y):
        return outputs["y"].mean()

    def forward(self, model, *, x):
        return {"y": model(x), "deep": {"mean": x.mean(1)}}

    def export_inputs(self):
        return self.inputs.value

    def export_outputs(self):
        return self.outputs.value


X = ExportSpec("x", "float32", (1, 4))


@pytest.fixture
def export(tmp_path):
    """Exports an experiment, untrained, into memory."""

    def run(experiment: Any, **options: Any) -> Memory:
        memory = Memory()
        handle = nitro.Nitro(experiment, data={}, run_dir=tmp_path / "run")
        target: dict[str, Any] = {"dir": tmp_path / "out", "name": "m_v1", **options}
        nitro.export_model(handle, memory, **target)
        return memory

    return run


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], r"`Wires\.export_inputs` returned \[\]"),
        ("x", "returned 'x'"),
        (["x"], "returned a list with 'x'"),
        ([X, X], "names `x` twice"),
        ([ExportSpec("x", None, (1, 4))], r"input `x` has no dtype[\s\S]*write `ExportSpec\(\"x\""),
        ([ExportSpec("x", "float32")], "input `x` has no shape"),
        ([ExportSpec("x", "float32", (1, 4), source="z")], r"has the source `z`[\s\S]*on outputs"),
        ([ExportSpec("x", "float32", (1, 5))], "forward` cannot take what `export_inputs`"),
        ([ExportSpec("z", "float32", (1, 4))], "wants the batch field `x`"),
        ([ExportSpec("x", "float32", (1, "a+k"))], r"`x` has the size 'a\+k'.*`a` cannot"),
        ([ExportSpec("x", "float32", (1, "k^2"))], r"linear expression of one name"),
        ([ExportSpec("x", "float32", (1, "b"))], r"has `b` in its shape .* the batch is called"),
        ([ExportSpec("x", "float32", ("n", "2*n"))], r"has `n` in its shape .* the batch is"),
    ],
)
def test_inputs_that_cannot_be_promised_are_refused(export, inputs, words):
    with pytest.raises((ExportError, nitro.errors.DataError), match=words):
        export(_of(Wires, inputs=inputs, outputs=[ExportSpec("y")]))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([], r"`Wires\.export_outputs` returned \[\]"),
        ([ExportSpec("z")], r"`z`[\s\S]*one of `deep\.mean`, `y`[\s\S]*source=\"deep\.mean\""),
        ([ExportSpec("q", source="deep")], "asks for `deep`"),
        ([ExportSpec("x")], r"name of a wire input[\s\S]*ExportSpec\(\"x\", source=\"x\"\)"),
        ([ExportSpec("y", "int32")], r"`y` has dtype float32[\s\S]*int32, as its ExportSpec"),
        ([ExportSpec("y", shape=(1, 3))], r"`y` has the shape \(1, 2\)[\s\S]*\(1, 3\)"),
        ([ExportSpec("y", shape=(1, 2, 1))], "as its ExportSpec says"),
        ([ExportSpec("m", source="deep.mean", batch_axis=2)], "`deep.mean` of .* has 1 axes"),
    ],
)
def test_outputs_that_forward_does_not_keep_are_refused(export, outputs, words):
    with pytest.raises(ExportError, match=words):
        export(_of(Wires, inputs=[X], outputs=outputs))


def test_outputs_that_no_wire_can_carry_are_refused(export):
    class Waves(Wires):
        def forward(self, model, *, x):
            return {"y": model(x), "all": x.sum(), "wave": jnp.fft.rfft(x)}

    with pytest.raises(ExportError, match=r"has 0 axes[\s\S]*return a value for each row"):
        export(_of(Waves, inputs=[X], outputs=[ExportSpec("all")]))
    with pytest.raises(ExportError, match=r"`wave` has dtype complex64[\s\S]*real and imaginary"):
        export(_of(Waves, inputs=[X], outputs=[ExportSpec("wave")]))


def test_nested_outputs_renames_and_echoes_arrive_under_their_names(export):
    outputs = [
        ExportSpec("mean", source="deep.mean"),
        ExportSpec("scores", source="y", batch_axis=2),
        ExportSpec("x", source="x"),
    ]

    memory = export(_of(Wires, inputs=[X], outputs=outputs), batch_sizes=(2,))

    assert [spec.name for spec in memory.program.outputs] == ["mean", "scores", "x"]
    assert [spec.shape for spec in memory.program.outputs] == [(2,), (2, 2), (2, 4)]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(memory(x=x)["x"], x)


def test_inputs_keep_the_order_of_the_hook(export):
    class Two(Wires):
        def forward(self, model, *, x, b, a):
            return {"y": model(x) + (a - b)[:, None]}

    inputs = [ExportSpec("b", "float32", (1,)), X, ExportSpec("a", "float32", (1,))]

    memory = export(_of(Two, inputs=inputs, outputs=[ExportSpec("y")]))

    assert [spec.name for spec in memory.program.inputs] == ["b", "x", "a"]
    assert [aval.shape for aval in memory.program.exported(1).in_avals[:3]] == [(1,), (1, 4), (1,)]


def test_a_tuple_has_no_names_and_is_refused(export):
    class Pair(Wires):
        def forward(self, model, *, x):
            return model(x), x

    with pytest.raises(HookError, match=r"returned tuple[\s\S]*name the outputs"):
        export(_of(Pair, inputs=[X], outputs=[ExportSpec("y")]))


def test_a_batch_of_another_kind_from_preprocess_is_refused(export):
    class Bare(Wires):
        def export_preprocess(self, x):
            return x

    with pytest.raises(ExportError, match=r"export_preprocess` returned"):
        export(_of(Bare, inputs=[X], outputs=[ExportSpec("y")]))


def test_an_output_that_does_not_follow_the_batch_is_refused(export):
    class Sum(Wires):
        def forward(self, model, *, x):
            return {"y": model(x).sum(0), "grid": model(x) @ model(x).T}

    with pytest.raises(ExportError, match=r"`y` has the shape \(2,\)[\s\S]*axis 1 to be the batch"):
        export(_of(Sum, inputs=[X], outputs=[ExportSpec("y")]))
    with pytest.raises(ExportError, match="no other to follow it"):
        export(_of(Sum, inputs=[X], outputs=[ExportSpec("grid")]))


class Told(Wires):
    """Has the hooks that ship something beside the program."""

    def export_postprocess(self):
        return self.extra.value

    def export_client_outputs(self):
        return [ExportSpec("label", "uint8", (1, "length"), axes=("batch", "characters"))]


def _told(extra):
    return _of(Told, inputs=[X], outputs=[ExportSpec("y")], extra=extra)


def test_postprocess_and_client_specs_reach_the_backend(export):
    source = "def postprocess(outputs):\n    return outputs\n"

    program = export(_told(source)).program

    assert program.postprocess == source
    assert program.client_outputs[0].axes == ("batch", "characters")
    assert program.client_inputs == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"x", r"export_postprocess` returned bytes[\s\S]*as text"),
        ("def f(:", "is not Python: .* on its line 1"),
        ("def post(o): return o", r"defines no function `postprocess`"),
    ],
)
def test_a_postprocess_that_cannot_run_is_refused(export, text, words):
    with pytest.raises(ExportError, match=words):
        export(_told(text))


def test_client_specs_without_a_postprocess_are_refused(export):
    class Client(Wires):
        def export_client_inputs(self):
            return [ExportSpec("text", "uint8", (1, 4))]

    with pytest.raises(ExportError, match=r"`export_client_inputs` and no `export_postprocess`"):
        export(_of(Client, inputs=[X], outputs=[ExportSpec("y")]))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ExportSpec("label", "uint8"), "client output `label` has no shape"),
        (ExportSpec("label", None, (1, 4)), "client output `label` has no dtype"),
        (ExportSpec("label", "uint8", (1, 4), source="y"), "`label` has the source `y`"),
    ],
)
def test_client_specs_that_promise_too_little_are_refused(export, spec, words):
    class Client(Told):
        def export_client_outputs(self):
            return [spec]

    source = "def postprocess(outputs):\n    return outputs\n"
    with pytest.raises(ExportError, match=words):
        export(_of(Client, inputs=[X], outputs=[ExportSpec("y")], extra=source))


def test_provenance_has_three_layers_and_the_caller_wins(export):
    class Known(Wires):
        def export_provenance(self):
            return {"team": "a", "dataset": "points", "seed": 99}

    program = export(
        _of(Known, inputs=[X], outputs=[ExportSpec("y")]), provenance={"team": "b"}
    ).program

    facts = program.provenance
    assert (facts["team"], facts["dataset"], facts["seed"]) == ("b", "points", 99)
    assert facts["experiment"] == "Known"


def test_provenance_that_is_no_mapping_is_refused(export):
    class Listed(Wires):
        def export_provenance(self):
            return ["a"]

    with pytest.raises(ExportError, match=r"export_provenance` returned \['a'\]"):
        export(_of(Listed, inputs=[X], outputs=[ExportSpec("y")]))


def test_device_fields_are_baked_and_dropout_is_inert(tmp_path):
    memory = Memory()
    run = nitro.Nitro(Scenes(), run_dir=tmp_path / "run").train()

    nitro.export_model(run, memory, dir=tmp_path, name="m", verify=False)

    assert not any("sharpness" in name or "rngs" in name for name in memory.program.weight_names)
    scene = make_scenes(1)
    pixels = (scene["img"] * 255).astype(np.uint8)
    wanted = run.predict({"img": pixels / np.float32(255), "light": scene["light"]})
    got = memory(pixels=pixels, light=scene["light"].T)
    np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sizes": ()}, "at least one size"),
        ({"batch_sizes": (0,)}, "each at least 1"),
        ({"platforms": ("gpu",)}, r"has 'gpu'[\s\S]*`\"cuda\"` or `\"rocm\"`"),
        ({"platforms": ()}, "at least one"),
        ({"platforms": ("tpu",)}, r"runs on cpu here[\s\S]*`verify=False`"),
        ({"dtype": "int8"}, "`dtype` is 'int8'"),
        ({"vjp_order": -1}, "`vjp_order` is -1"),
        ({"constraints": ["b > 2"]}, "'b > 2' is not one"),
        ({"constraints": 3}, "constraint 3 is not one"),
        ({"batch_sizes": None}, "`batch_sizes` is None"),
        ({"vjp_order": 1.0}, r"`vjp_order` is 1\.0"),
        ({"dynamic_batch": "yes"}, "`dynamic_batch` is 'yes'"),
        ({"provenance": ["x"]}, r"`provenance` is \['x'\]"),
        ({"golden": 3}, "`golden` is 3"),
        ({"name": "a/b"}, "`name` is 'a/b'"),
        ({"name": "a\0b"}, "`name` is 'a"),
        ({"name": 3}, "`name` is 3"),
        ({"name": "x" * 201}, "at most 200 bytes"),
        ({"dir": __file__}, r"`dir` is `.*`, and `.*\.py` is a file"),
        ({"dir": __file__ + "/below"}, r"and `.*\.py` is a file"),
    ],
)
def test_options_are_checked_before_any_work(export, options, words):
    with pytest.raises(ConfigError, match=words):
        export(_of(Wires, inputs=5, outputs=5), **options)


def test_a_handle_and_a_backend_are_wanted(tmp_path):
    with pytest.raises(ConfigError, match=r"`run` is 'runs/x'[\s\S]*a handle"):
        nitro.export_model("runs/x", Memory(), dir=tmp_path, name="m")  # pyright: ignore[reportArgumentType] - what is tested

    experiment = _of(Wires, inputs=[X], outputs=[ExportSpec("y")])
    handle = nitro.Nitro(experiment, data={}, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match="`backend` is None"):
        nitro.export_model(handle, None, dir=tmp_path, name="m")  # pyright: ignore[reportArgumentType] - what is tested


def test_a_batch_size_that_no_caller_may_send_is_refused(export):
    experiment = _of(Wires, inputs=[X], outputs=[ExportSpec("y")])

    with pytest.raises(ConfigError, match=r"has 1, which breaks [\s\S]*batch_sizes=\(4,\)"):
        export(experiment, batch_sizes=(1, 4), constraints=("b >= 3", "mod(b, 4) == 0"))


def test_golden_inputs_can_be_given_and_are_checked(export):
    x = np.ones((3, 4), np.float32)
    experiment = _of(Wires, inputs=[X], outputs=[ExportSpec("y")])

    memory = export(experiment, golden={"x": x})

    np.testing.assert_array_equal(memory.program.golden.inputs["x"], x)
    with pytest.raises(ExportError, match=r"`golden` does not fit[\s\S]*float32\(1, 4\)"):
        export(experiment, golden={"x": x[:, :2]}, overwrite=True)


def test_weights_are_converted_and_outputs_keep_their_dtype(export):
    memory = export(_of(Wires, inputs=[X], outputs=[ExportSpec("y")]), dtype="bfloat16")

    program = memory.program
    assert {np.dtype(w.dtype).name for w in program.weights.values()} == {"bfloat16"}
    assert [spec.dtype for spec in program.outputs] == ["float32"]
    jaxpr = str(jax.make_jaxpr(program.fn)(*program.arguments(1)))
    assert "bf16[1,2] = dot_general" in jaxpr.replace(":", "").replace("  ", " ")


def test_the_differences_found_are_handed_to_the_backend(export):
    found = export(_of(Wires, inputs=[X], outputs=[ExportSpec("y")])).verification

    assert found["rtol"] == 1e-5
    assert found["outputs"]["y"]["max_abs"] < 1e-6
    assert {"b": 3} in found["sizes"]


def test_the_phase_is_exporting_and_then_what_it_was(tmp_path):
    phases = []

    class Failing(Memory):
        def write(self, program, path, **options):
            phases.append(run.phase)
            raise OSError("disk full")

    run = nitro.Nitro(
        _of(Wires, inputs=[X], outputs=[ExportSpec("y")]), data={}, run_dir=tmp_path / "r"
    )
    before = run.phase

    with pytest.raises(OSError, match="disk full"):
        nitro.export_model(run, Failing(), dir=tmp_path / "out", name="m")

    assert phases == [nitro.Phase.EXPORTING]
    assert run.phase is before
    assert list((tmp_path / "out").iterdir()) == []


class Tables(Wires):
    """Makes numbers whose dtypes JAX chooses, which differ where it keeps 64 bits."""

    def forward(self, model, *, x):
        steps = jnp.linspace(0, 1, x.shape[1]) + jnp.arange(x.shape[1])
        return {"y": model(x.astype(jnp.float32)) + steps.mean(), "sum": x.sum(1), "x": x * 3}


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "int32"])
def test_a_wide_wire_gives_what_predict_gives(export, tmp_path, dtype):
    outputs = [ExportSpec("y"), ExportSpec("sum"), ExportSpec("raw", source="wire")]
    x = np.arange(8, dtype=dtype).reshape(2, 4)

    class Wide(Tables):
        def export_preprocess(self, wire):
            return {"x": wire}

    experiment = _of(Wide, inputs=[ExportSpec("wire", dtype, (1, 4))], outputs=outputs)
    program = export(experiment, batch_sizes=(2,), verify=False).program
    with jax.enable_x64(True):
        got = program.exported(2).call(x, *(program.weights[n] for n in program.weight_names))

    run = nitro.Nitro(experiment, data={}, run_dir=tmp_path / "run")
    wanted = run.predict({"x": x})
    for array, name in zip(got, ("y", "sum"), strict=False):
        assert array.dtype == wanted[name].dtype
        np.testing.assert_allclose(array, wanted[name], rtol=1e-6)
    # What the wire promises, no dtype of training narrows.
    assert got[2].dtype == dtype
    np.testing.assert_array_equal(got[2], x)


def test_weights_become_float64_where_no_wire_is_so_wide(export):
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    experiment = _of(Wires, inputs=[X], outputs=[ExportSpec("y")])

    program = export(experiment, batch_sizes=(3,), dtype="float64", verify=False).program
    weights = {name: np.asarray(program.weights[name]) for name in program.weight_names}
    with jax.enable_x64(True):
        (y,) = program.exported(3).call(x, *weights.values())

    assert {array.dtype.name for array in weights.values()} == {"float64"}
    # Exact to the last bit of float32, which a sum in float32 would not be.
    exact = x.astype(np.float64) @ weights["kernel"] + weights["bias"]
    np.testing.assert_array_equal(y, exact.astype(np.float32))


def test_infinities_of_the_other_sign_are_a_difference(tmp_path):
    class Negative(Memory):
        def __call__(self, **inputs):
            return {name: -array for name, array in super().__call__(**inputs).items()}

    class Infinite(Wires):
        def forward(self, model, *, x):
            return {"y": model(x) * 0 + jnp.inf}

    experiment = _of(Infinite, inputs=[X], outputs=[ExportSpec("y")])
    run = nitro.Nitro(experiment, data={}, run_dir=tmp_path / "run")
    with pytest.raises(ExportError, match="has infinities or NaNs in other places"):
        nitro.export_model(run, Negative(), dir=tmp_path, name="m")


def test_two_threads_that_export_leave_jax_as_it_was():
    """Each sets options of the whole process; the first one ends before the second."""
    before = jax.config.jax_traceback_in_locations_limit  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    is_second_inside, has_first_ended = threading.Event(), threading.Event()
    arguments = [jax.ShapeDtypeStruct((1,), np.float32)]

    def second(x):
        is_second_inside.set()
        has_first_ended.wait(timeout=30)
        return (x,)

    thread = threading.Thread(
        target=lambda: export_traced(second, arguments, platforms=["cpu"]), daemon=True
    )

    def first(x):
        thread.start()
        # The second one should wait outside, so it never comes in.
        is_second_inside.wait(timeout=0.5)
        return (x,)

    export_traced(first, arguments, platforms=["cpu"])
    has_first_ended.set()
    thread.join()

    assert jax.config.jax_traceback_in_locations_limit == before  # pyright: ignore[reportAttributeAccessIssue] - made at run time
