from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

import nitro
from nitro import Device, GraphConst
from nitro.errors import ConfigError, ExperimentError, HostFieldError


@dataclass(frozen=True)
class Head:
    scale: Device[float] = 1.0
    bias: GraphConst[bool] = True


@dataclass(frozen=True)
class Model:
    """A group with every residency in it, and a group of its own."""

    width: GraphConst[int] = 8
    """Hidden units."""
    head: Head = Head()
    path: str = "weights"

    def doubled(self) -> int:
        return 2 * self.width


class Grouped(nitro.Experiment):
    model: Model = Model()
    """Sizes."""
    repeats: int = 3


@pytest.fixture
def grouped(plane: Any) -> type:
    """A plane whose loss is what `read` makes of it and the experiment."""

    class GroupedPlane(Grouped, plane):
        read: GraphConst[Any] = None

        def loss(self, height: Any, *, y: Any) -> Any:
            return self.read(self) * super().loss(height, y=y)

    return GroupedPlane


def test_fields_of_a_group_are_listed_one_by_one() -> None:
    fields = Grouped.fields()

    assert {name: f.residency.value for name, f in fields.items()} == {
        "model.width": "GraphConst",
        "model.head.scale": "Device",
        "model.head.bias": "GraphConst",
        "model.path": "Host",
        "repeats": "Host",
    }
    assert (fields["model.width"].default, fields["model.width"].doc) == (8, "Hidden units.")
    assert fields["model.width"].location.startswith(__file__)
    assert "model.head.scale  Device[float]     = 1.0" in (Grouped.__doc__ or "")


def test_marker_around_a_group_is_for_all_of_it() -> None:
    @dataclass(frozen=True)
    class Sizes:
        width: int = 1
        depth: int = 2

    class Marked(nitro.Experiment):
        sizes: GraphConst[Sizes] = Sizes()

    assert {f.residency.value for f in Marked.fields().values()} == {"GraphConst"}
    assert Marked(sizes=Sizes(width=3.0)).sizes == Sizes(width=3)  # pyright: ignore[reportArgumentType]


def test_dotted_override_changes_one_value_and_keeps_the_rest() -> None:
    changed = Grouped(model=Model(path="other"), **{"model.width": 256.0, "model.head.scale": 0.5})

    assert changed.model == Model(width=256, head=Head(scale=0.5), path="other")
    assert type(changed.model.width) is int
    assert changed.replace(**{"model.path": "x"}).model.width == 256
    assert Grouped().model == Model()


def test_overrides_of_a_group_are_applied_together() -> None:
    @dataclass(frozen=True)
    class Heads:
        width: int = 8
        heads: int = 2

        def __post_init__(self) -> None:
            if self.width % self.heads:
                raise ValueError("heads must divide width")

    class Attention(nitro.Experiment):
        heads: Heads = Heads()

    changed = Attention(**{"heads.width": 9, "heads.heads": 3})

    assert changed.heads == Heads(9, 3)
    with pytest.raises(ValueError, match="must divide"):
        Attention(**{"heads.width": 9})


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"model.widht": 1}, ExperimentError, r"no field `model\.widht`[\s\S]*`model\.width`\?"),
        ({"repeats.x": 1}, ExperimentError, r"no field `repeats\.x`"),
        ({"model": 3}, ConfigError, r"`Grouped\.model` is 3 \(int\)[\s\S]*a `Model` itself"),
        ({"model": None, "model.width": 1}, ConfigError, r"`Grouped\.model` is None"),
        ({"model.width": 1.5}, ConfigError, r"`Grouped\.model\.width` is 1\.5[\s\S]*type int"),
        ({"model.head": Model()}, ConfigError, r"`Grouped\.model\.head` is Model"),
    ],
)
def test_value_that_does_not_fit_a_group_is_refused(
    values: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Grouped(**values)


def test_subclass_of_a_group_is_refused_where_a_trace_would_miss_its_fields() -> None:
    @dataclass(frozen=True)
    class Larger(Model):
        depth: GraphConst[int] = 2

    with pytest.raises(ConfigError, match=r"\(Larger\)[\s\S]*a `Model` itself"):
        Grouped(model=Larger())


def test_markers_around_and_inside_a_group_are_refused() -> None:
    with pytest.raises(ExperimentError, match=r"`Model\.width` .*marked, and so is the group `m`"):
        type(
            "Bad", (nitro.Experiment,), {"__annotations__": {"m": GraphConst[Model]}, "m": Model()}
        )


def test_group_that_can_change_in_place_is_refused() -> None:
    @dataclass
    class Loose:
        width: GraphConst[int] = 8

    with pytest.raises(ExperimentError, match=r"`Loose` .*not frozen[\s\S]*frozen=True"):
        type("Bad", (nitro.Experiment,), {"__annotations__": {"m": Loose}})


def test_group_with_a_default_of_another_type_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"`Bad\.m` .*default None[\s\S]*`Model \| None`"):
        type("Bad", (nitro.Experiment,), {"__annotations__": {"m": Model}, "m": None})


def test_trace_sees_values_and_tracers_and_no_host_field(grouped: Any, make_run: Any) -> None:
    seen: dict[str, Any] = {}

    def read(view: Any) -> Any:
        model = view.model
        seen.update(width=model.width, double=model.doubled(), scale=model.head.scale)
        assert isinstance(model, Model)
        assert dataclasses.replace(model.head, bias=False).bias is False
        assert "width=8" in repr(model)
        with pytest.raises(
            HostFieldError, match=r"`GroupedPlane\.model\.path`[\s\S]*`path: Device"
        ):
            _ = model.path
        with pytest.raises(AttributeError, match="cannot assign"):
            model.width = 2
        return model.head.scale

    make_run(grouped(read=read)).validate()

    assert (seen["width"], seen["double"]) == (8, 16)
    assert isinstance(seen["scale"], jax.core.Tracer)


def test_structural_group_equals_and_hashes_as_itself_in_a_trace(plane: Any, make_run: Any) -> None:
    class Structural(plane):
        head: GraphConst[Head2] = Head2()

        def loss(self, height: Any, *, y: Any) -> Any:
            assert self.head == Head2()
            assert hash(self.head) == hash(Head2())
            return super().loss(height, y=y)

    make_run(Structural()).validate()


@dataclass(frozen=True)
class Head2:
    width: int = 3


def test_only_structural_values_that_are_read_make_new_programs(
    grouped: Any, make_run: Any
) -> None:
    def read(view: Any) -> Any:
        return view.model.width * view.model.head.scale

    make_run(grouped(read=read)).validate()
    before = nitro.cache_stats()["misses"]

    more = {"model.head.scale": 2.0, "model.path": "x", "model.head.bias": False}
    make_run(grouped(read=read, **more)).validate()
    unread = nitro.cache_stats()["misses"]
    make_run(grouped(read=read, **{"model.width": 9})).validate()

    assert unread == before
    # The loss, whole and ragged; `forward` reads no field.
    assert nitro.cache_stats()["misses"] == before + 2
    assert "GroupedPlane.model.width: 8 → 9" in str(nitro.explain_compiles())


def test_edited_method_of_a_group_makes_a_new_program(plane: Any, make_run: Any) -> None:
    def run_with(factor: int) -> float:
        names: dict[str, Any] = {"GraphConst": GraphConst, "dataclass": dataclass}
        source = (
            "@dataclass(frozen=True)\nclass Sizes:\n    width: GraphConst[int] = 2\n"
            f"    def scaled(self):\n        return {factor} * self.width\n"
        )
        exec(compile(source, "sizes.py", "exec", dont_inherit=True), names)
        sizes = names["Sizes"]

        def loss(self: Any, height: Any, *, y: Any) -> Any:
            return self.sizes.scaled() * ((height - y) ** 2).mean()

        body = {"__annotations__": {"sizes": sizes}, "sizes": sizes(), "loss": loss}
        return make_run(type("Scaled", (plane,), body)()).validate()["val_loss"]

    assert run_with(3) == pytest.approx(3 * run_with(1), rel=1e-6)


def test_device_field_of_a_group_is_set_and_read_by_its_dotted_name(
    grouped: Any, make_run: Any
) -> None:
    run = make_run(grouped(read=lambda view: view.model.head.scale))
    before = run.validate()["val_loss"]

    run.set_device(**{"model.head.scale": 2.0})

    assert run.validate()["val_loss"] == pytest.approx(2 * before, rel=1e-6)
    assert run.device_value("model.head.scale") == np.float32(2)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model", r"`GroupedPlane\.model` is a group[\s\S]*`model\.head\.scale`"),
        ("model.path", r"`GroupedPlane\.model\.path` is host-only[\s\S]*`path: Device\[\.\.\.\]`"),
        ("model.width", r"is GraphConst[\s\S]*replace\(\*\*\{'model\.width': \.\.\.\}\)"),
        ("model.head.scal", r"no field `model\.head\.scal`[\s\S]*`model\.head\.scale`\?"),
    ],
)
def test_name_in_a_group_that_is_no_device_field_is_refused(
    grouped: Any, make_run: Any, name: str, words: str
) -> None:
    run = make_run(grouped(read=lambda view: 1.0))

    with pytest.raises(ConfigError, match=words):
        run.set_device(**{name: 1.0})
    with pytest.raises(ConfigError, match=words):
        run.device_value(name)


def test_field_of_a_group_is_scheduled_by_its_dotted_name(grouped: Any, make_run: Any) -> None:
    run = make_run(
        grouped(read=lambda view: view.model.head.scale),
        schedules={"model.head.scale": lambda total: lambda step: 1.0 + step},
    ).train()

    assert run.device_value("model.head.scale") == np.float32(run.step)
    with pytest.raises(ConfigError, match=r"`GroupedPlane\.model\.head\.scale` is scheduled"):
        run.set_device(**{"model.head.scale": 1.0})


def test_record_and_log_have_every_value_of_a_group(grouped: Any, make_run: Any) -> None:
    run = make_run(grouped(read=lambda view: 1.0, **{"model.width": 9})).train()

    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
    params = next(line for line in map(json.loads, lines) if line["type"] == "params")
    assert params["model.width"] == 9
    assert params["model.path"] == "weights"


def test_pytree_that_is_traced_whole_stays_one_field(plane: Any, make_run: Any) -> None:
    class Tables(plane):
        tables: Device[Pair] = Pair(np.float32(2), np.float32(3))

        def loss(self, height: Any, *, y: Any) -> Any:
            return sum(jax.tree.leaves(self.tables)) * super().loss(height, y=y)

    assert list(Tables.fields()) == ["tables"]
    assert make_run(Tables()).validate()["val_loss"] > 0


@struct.dataclass
class Pair:
    first: Any
    second: Any


def test_tuple_of_arrays_in_a_device_field_is_placed_leaf_by_leaf(
    plane: Any, make_run: Any
) -> None:
    class Buffers(plane):
        buffers: Device[tuple[Any, ...]] = (np.ones(3, np.float32), np.zeros((2, 2)))

        def loss(self, height: Any, *, y: Any) -> Any:
            return self.buffers[0].sum() * super().loss(height, y=y)

    value = make_run(Buffers()).device_value("buffers")

    assert [leaf.shape for leaf in value] == [(3,), (2, 2)]
    assert all(type(leaf) is np.ndarray for leaf in value)


def test_group_builds_the_model_on_the_host(plane: Any, make_run: Any) -> None:
    class Sized(Grouped, plane):
        def build_model(self, rngs: nnx.Rngs) -> Any:
            assert self.model.path == "weights"
            return nnx.Sequential(
                nnx.Linear(4, self.model.width, rngs=rngs),
                nnx.Linear(self.model.width, 1, rngs=rngs),
            )

    run = make_run(Sized(**{"model.width": 5}))

    assert run.predict({"x": jnp.ones((2, 4))}).shape == (2,)
    assert run.model.layers[0].kernel.shape == (4, 5)
