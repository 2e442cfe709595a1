from __future__ import annotations

import enum
import inspect
import linecache
import pydoc
from dataclasses import InitVar, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import pytest

import nitro
from nitro import Device, GraphConst, Host
from nitro._experiment import NO_DEFAULT, parse_override
from nitro._experiment._declaration import hook_names
from nitro.errors import ConfigError, ExperimentError, NitroError


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Typed(nitro.Experiment):
    count: GraphConst[int] = 1
    rate: GraphConst[float] = 0.5
    flag: GraphConst[bool] = False
    name: GraphConst[str] = "a"
    color: GraphConst[Color] = Color.RED
    sizes: GraphConst[tuple[int, ...]] = ()
    pair: GraphConst[tuple[int, str]] = (1, "a")
    mode: GraphConst[Literal["min", "max"]] = "min"
    limit: GraphConst[int | None] = None
    folder: Path | None = None


def test_each_field_has_the_residency_of_its_marker() -> None:
    class Marked(nitro.Experiment):
        width: GraphConst[int] = 128
        rate: Device[float] = 0.1
        path: Host[str] = "data"
        epochs: int = 3

    residencies = {name: field.residency.value for name, field in Marked.fields().items()}

    assert residencies == {
        "width": "GraphConst",
        "rate": "Device",
        "path": "Host",
        "epochs": "Host",
    }
    assert [field.type for field in Marked.fields().values()] == [int, float, str, int]


def test_strings_under_fields_are_kept_as_their_docs() -> None:
    class Documented(nitro.Experiment):
        width: GraphConst[int] = 128
        """Hidden units.

        Structural.
        """
        depth: int = 2

    assert Documented.fields()["width"].doc == "Hidden units.\n\nStructural."
    assert Documented.fields()["depth"].doc == ""


def test_subclass_overrides_a_default_and_keeps_the_order() -> None:
    class Base(nitro.Experiment):
        width: GraphConst[int] = 128
        depth: int = 2

    class Wide(Base):
        width: GraphConst[int] = 256
        extra: str = "x"

    assert list(Wide.fields()) == ["width", "depth", "extra"]
    assert (Wide().width, Wide().depth, Base().width) == (256, 2, 128)


def test_required_field_must_be_given() -> None:
    class Required(nitro.Experiment):
        path: str
        limit: int | None = None

    assert Required(path="x").limit is None
    with pytest.raises(ExperimentError, match=r"lacks the required field `path`[\s\S]*path=\.\.\."):
        Required()


def test_unknown_field_is_refused_with_a_guess() -> None:
    with pytest.raises(ExperimentError, match=r"no field `colour`[\s\S]*did you mean `color`\?"):
        Typed(colour=Color.RED)


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("count", 3.0, 3),
        ("count", np.int64(3), 3),
        ("rate", 2, 2.0),
        ("rate", np.float32(0.5), 0.5),
        ("flag", np.True_, True),
        ("color", "BLUE", Color.BLUE),
        ("color", "blue", Color.BLUE),
        ("sizes", [1, 2.0], (1, 2)),
        ("pair", [2.0, "b"], (2, "b")),
        ("mode", "max", "max"),
        ("limit", 3.0, 3),
    ],
)
def test_structural_value_is_converted(name: str, given: Any, stored: Any) -> None:
    value = getattr(Typed(**{name: given}), name)

    assert value == stored
    assert type(value) is type(stored)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("count", True),
        ("count", 2.5),
        ("count", float("inf")),
        ("count", "3"),
        ("rate", True),
        ("flag", 1),
        ("name", 1),
        ("color", "green"),
        ("sizes", 3),
        ("sizes", [1.5]),
        ("pair", (1, "a", 2)),
        ("mode", "mean"),
        ("limit", float("inf")),
    ],
)
def test_structural_value_that_does_not_fit_is_refused(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"`Typed\.{name}` is .*[\s\S]*declared type"):
        Typed(**{name: given})


def test_host_values_and_device_arrays_that_fit_are_stored_as_given() -> None:
    class Loose(nitro.Experiment):
        rate: Device[float] = 0.5
        path: str = ""

    array = np.arange(3.0)
    experiment = Loose(rate=array, path=7)  # pyright: ignore[reportArgumentType]

    assert experiment.rate is array
    assert experiment.path == 7


class Pull(NamedTuple):
    near: float
    far: float


class Traced(nitro.Experiment):
    rate: Device[float] = 1
    steps: Device[int] = 3
    limit: Device[float | None] = None
    pair: Device[tuple[float, int]] = (1, 2)
    table: Device[dict[str, float]] = field(default_factory=lambda: {"a": 1})
    pull: Device[Pull] = Pull(1, 2)
    free: Device[Any] = 1


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("rate", 2, 2.0),
        ("rate", np.int64(2), 2.0),
        ("rate", np.float16(0.5), 0.5),
        ("steps", 4.0, 4),
        ("limit", 2, 2.0),
        ("pair", [2, 3.0], [2.0, 3]),
        ("table", {"b": 2}, {"b": 2.0}),
        ("pull", Pull(3, 4), Pull(3.0, 4.0)),
        ("free", 2, 2),
    ],
)
def test_declared_type_decides_what_a_device_field_holds(
    name: str, given: Any, stored: Any
) -> None:
    experiment = Traced(**{name: given})

    assert repr(getattr(experiment, name)) == repr(stored)
    assert repr((experiment.rate, Traced().table)) == f"({float(experiment.rate)}, {{'a': 1.0}})"


@pytest.mark.parametrize(("name", "given"), [("rate", True), ("rate", "1"), ("steps", 2.5)])
def test_number_that_a_device_field_cannot_hold_is_refused(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"`Traced\.{name}` is [\s\S]*the declared type"):
        Traced(**{name: given})


def test_integers_of_a_device_field_of_floats_become_floats() -> None:
    whole = Traced(rate=np.arange(3), steps=np.array([1.0, 2.0]))  # pyright: ignore[reportArgumentType]

    assert np.asarray(whole.rate).dtype.kind == "f"
    assert np.asarray(whole.steps).tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"`Traced\.steps`"):
        Traced(steps=np.array([1.5]))  # pyright: ignore[reportArgumentType]


def test_experiment_is_frozen_and_replace_checks() -> None:
    experiment = Typed(count=2)

    assert experiment.replace(count=5).count == 5
    assert experiment.count == 2
    with pytest.raises(AttributeError, match="cannot assign"):
        experiment.count = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="count"):
        experiment.replace(count="x")


def test_field_cannot_be_read_off_the_class() -> None:
    with pytest.raises(AttributeError, match=r"`Typed\.count` is a field: .*`self\.count`"):
        _ = Typed.count


def test_repr_shows_the_fields() -> None:
    assert repr(Typed(count=2)).startswith("Typed(count=2, rate=0.5, flag=False, name='a'")


def test_field_without_annotation_is_refused() -> None:
    with pytest.raises(
        ExperimentError,
        match=r"`Bad\.width = 128` \(.*test_experiment\.py:\d+\) has no type"
        r"[\s\S]*GraphConst\[int\][\s\S]*Device\[float\][\s\S]*ClassVar",
    ):

        class Bad(nitro.Experiment):
            width = 128


def test_constants_and_helpers_are_no_fields() -> None:
    class Fine(nitro.Experiment):
        CLASSES = 10
        _private = 3
        activation = staticmethod(np.tanh)

    assert list(Fine.fields()) == []


def test_marker_without_a_type_is_refused() -> None:
    with pytest.raises(
        ExperimentError,
        match=r"`Bad\.width` \(.*:\d+\) uses `GraphConst` without a type[\s\S]*\[int\]",
    ):

        class Bad(nitro.Experiment):
            width: GraphConst = 128


@pytest.mark.parametrize("hint", [GraphConst[Device[int]], tuple[Device[int], int]])
def test_marker_inside_another_type_is_refused(hint: Any) -> None:
    with pytest.raises(ExperimentError, match=r"one marker inside another[\s\S]*around the whole"):
        type("Bad", (nitro.Experiment,), {"__annotations__": {"width": hint}, "width": 1})


def test_annotation_that_names_nothing_is_refused() -> None:
    with pytest.raises(
        ExperimentError, match=r"names `Missing`, which is not defined[\s\S]*import"
    ):

        class Bad(nitro.Experiment):
            width: Missing = 1  # noqa: F821 # pyright: ignore


def test_mutable_default_is_refused_with_the_factory() -> None:
    with pytest.raises(ExperimentError, match=r"mutable default[\s\S]*default_factory"):

        class Bad(nitro.Experiment):
            sizes: list[int] = []  # noqa: RUF012


def test_every_hook_is_described_where_users_look() -> None:
    described = nitro.Experiment.__doc__ or ""

    assert [hook for hook in hook_names() if f"`{hook}" not in described] == []


@pytest.mark.parametrize("hook", ["build_data", "build_model", "forward", "loss"])
def test_missing_hook_is_named_with_its_signature(hook: str, plane: Any) -> None:
    hooks = ("build_data", "build_model", "forward", "loss")
    body = {name: getattr(plane, name) for name in hooks if name != hook}
    lacking = type("Lacking", (nitro.Experiment,), body)

    with pytest.raises(
        ExperimentError,
        match=rf"lacks the hook `{hook}\(self[\s\S]*required hooks: build_data, build_model, forward, loss[\s\S]*`def {hook}",
    ):
        nitro.Nitro(lacking())


@pytest.mark.parametrize(
    ("given", "words"), [(Typed, r"write `Nitro\(Typed\(\)\)`"), (5, r"got 5 \(int\)")]
)
def test_what_is_no_experiment_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ExperimentError, match=words):
        nitro.Nitro(given)


@pytest.mark.parametrize(
    ("name", "signature"),
    [("forward", "self, model, x"), ("loss", "self, outputs, *args"), ("metrics", "self, *, y")],
)
def test_hook_with_other_positional_arguments_is_refused(
    plane: Any, name: str, signature: str
) -> None:
    names: dict[str, Any] = {}
    exec(f"def {name}({signature}): ...", names)
    wrong = type("Wrong", (plane,), {name: names[name]})

    with pytest.raises(ExperimentError, match=rf"has the positional arg[\s\S]*`def {name}\(self, "):
        nitro.Nitro(wrong())


def test_field_knows_its_line_default_and_type() -> None:
    class Lined(nitro.Experiment):
        width: GraphConst[int] = 128
        path: str

    width, path = Lined.fields().values()

    file, _, line = width.location.rpartition(":")
    assert file == __file__
    assert path.location == f"{file}:{int(line) + 1}"
    assert (width.default, path.default) == (128, NO_DEFAULT)


def test_help_shows_the_prose_and_a_table_of_the_fields() -> None:
    class Documented(nitro.Experiment):
        """Classifies digits."""

        width: GraphConst[int] = 128
        """Hidden units."""
        path: str

    assert inspect.getdoc(Documented) == (
        "Classifies digits.\n\n"
        "Fields:\n"
        "    width  GraphConst[int]  = 128\n"
        "        Hidden units.\n"
        "    path   str              (required)"
    )
    assert "GraphConst[int]  = 128" in pydoc.render_doc(Documented)


def test_subclass_without_prose_inherits_it_with_a_table_of_its_own() -> None:
    class Base(nitro.Experiment):
        """Classifies digits."""

        width: GraphConst[int] = 128

    class Deep(Base):
        depth: int = 2

    doc = inspect.getdoc(Deep) or ""
    assert doc.startswith("Classifies digits.\n\nFields:\n    width")
    assert doc.count("Fields:") == 1
    assert doc.endswith("    depth  int              = 2")


@pytest.mark.parametrize(
    "name", ["fields", "replace", "presets", "from_preset", "forward", "metrics", "optimizer"]
)
def test_field_named_like_a_method_is_refused(name: str) -> None:
    with pytest.raises(ExperimentError, match=rf"`Bad\.{name}` .*name of a[\s\S]*`{name}_`"):
        type("Bad", (nitro.Experiment,), {"__annotations__": {name: int}, name: 1})


def test_rate_and_decay_may_be_fields() -> None:
    class Rated(nitro.Experiment):
        learning_rate: float = 1e-2
        weight_decay: float

    assert Rated(weight_decay=0.1).weight_decay == 0.1


def test_field_declared_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(
        ExperimentError,
        match=r"`Bad\.width` \(.*:\d+\) is declared twice, in the lines \d+ and \d+",
    ):

        class Bad(nitro.Experiment):
            width: int = 1  # pyright: ignore[reportRedeclaration] - what the test is about
            depth: int = 2
            width: int = 3


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (Final[int], r"is `Final`[\s\S]*frozen as they are"),
        (InitVar[int], "is an `InitVar`[\\s\\S]*kept and recorded"),
        (TypeVar("S"), r"type variable `~S`[\s\S]*subclass for each type"),
    ],
)
def test_annotation_that_cannot_be_a_field_is_refused(hint: Any, words: str) -> None:
    with pytest.raises(ExperimentError, match=rf"`Bad\.width` .*{words}"):
        type("Bad", (nitro.Experiment,), {"__annotations__": {"width": hint}, "width": 1})


def test_field_that_the_constructor_does_not_take_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"`Bad\.width` .*init=False[\s\S]*write a property"):

        class Bad(nitro.Experiment):
            width: int = field(init=False, default=1)


def test_own_constructor_is_refused() -> None:
    with pytest.raises(ExperimentError, match=r"defines `__init__`[\s\S]*`__post_init__\(self\)`"):

        class Bad(nitro.Experiment):
            def __init__(self) -> None: ...


def test_post_init_sees_converted_values() -> None:
    class Checked(nitro.Experiment):
        width: GraphConst[int] = 2

        def __post_init__(self) -> None:
            if type(self.width) is not int or self.width % 2:
                raise ValueError("width must be even")

    assert Checked(width=4.0).width == 4  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="must be even"):
        Checked(width=3)


def test_class_of_a_notebook_keeps_its_docs_and_lines() -> None:
    lines = ["class Typed(nitro.Experiment):", "    width: int = 1", "    'Hidden units.'", ""]
    cell, source = "<ipython-input-1>", "\n".join(lines)
    linecache.cache[cell] = (len(source), None, [line + "\n" for line in lines], cell)
    names: dict[str, Any] = {"nitro": nitro, "__name__": __name__}
    exec(compile(source, cell, "exec"), names)

    width = names["Typed"].fields()["width"]

    assert (width.doc, width.location) == ("Hidden units.", f"{cell}:2")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("count=3", "count", 3),
        ("rate=2", "rate", 2.0),
        ("flag=true", "flag", True),
        ("name=3", "name", "3"),
        ("name=a=b", "name", "a=b"),
        ("color=red", "color", Color.RED),
        ("sizes=(3, 5)", "sizes", (3, 5)),
        ("limit=none", "limit", None),
        ("folder=a/b", "folder", Path("a/b")),
        ("folder=5", "folder", Path("5")),
        ("count=1e1", "count", 10),
        ("count=007", "count", 7),
        ("rate=inf", "rate", float("inf")),
        ("flag=0", "flag", False),
        ("flag=Yes", "flag", True),
        ("name=0", "name", "0"),
        ("name=no", "name", "no"),
        ("limit=1", "limit", 1),
    ],
)
def test_word_of_a_command_line_is_read_by_the_declared_type(
    text: str, name: str, value: Any
) -> None:
    assert parse_override(Typed, text) == (name, value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("count", "`count` sets nothing"),
        ("flag=2", "does not fit the field `Typed.flag`"),
        ("count=yes", "does not fit the field `Typed.count`"),
        ("count=2.5", r"`count=2\.5` does not fit[\s\S]*declared type int"),
        ("cuont=2", r"no field `cuont`[\s\S]*did you mean `count`"),
    ],
)
def test_word_of_a_command_line_that_sets_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(NitroError, match=words):
        parse_override(Typed, text)
