from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import nitro
from nitro import Device, GraphConst
from nitro.errors import HostFieldError

WAYS_OUT = r"GraphConst\[\.\.\.\]`[\s\S]*Device\[\.\.\.\]`[\s\S]*runs on the host"

READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda view: view.host,
    "getattr with a default": lambda view: getattr(view, "host", 1.0),
    "hasattr": lambda view: hasattr(view, "host"),
    "through the class": lambda view: type(view).host,
    "through a property": lambda view: view.twice,
    "through super": lambda view: view.from_base(),
}


class Base(nitro.Experiment):
    host: float = 1.0

    def from_base(self) -> float:
        return self.host


class Scaled(Base):
    const: GraphConst[float] = 3.0
    device: Device[float] = 0.5

    @property
    def twice(self) -> float:
        return 2 * self.host

    def from_base(self) -> float:
        return super().from_base()


@pytest.fixture
def scaled(plane: Any) -> type:
    """A plane whose loss is scaled by what `read` gives for the experiment that it sees."""

    class ScaledPlane(Scaled, plane):
        read: GraphConst[Any] = None

        def loss(self, height: Any, *, y: Any) -> Any:
            return self.read(self) * super().loss(height, y=y)

    return ScaledPlane


@pytest.mark.parametrize("how", READS)
def test_reading_a_host_field_in_a_traced_hook_names_the_ways_out(
    how: str, scaled: Any, make_run: Any
) -> None:
    run = make_run(scaled(read=READS[how]))

    with pytest.raises(HostFieldError, match=rf"host-only field `\w+\.host`[\s\S]*{WAYS_OUT}"):
        run.train()


def test_host_field_error_is_not_swallowed_as_a_missing_attribute() -> None:
    assert not issubclass(HostFieldError, AttributeError)


def test_traced_hook_sees_structural_and_device_values(scaled: Any, make_run: Any) -> None:
    plain = make_run(scaled(read=lambda _: 1.0)).validate()

    run = make_run(scaled(read=lambda view: view.const * view.device))

    assert run.validate()["val_loss"] == pytest.approx(1.5 * plain["val_loss"], rel=1e-6)


def test_structural_field_is_not_read_off_the_class(scaled: Any, make_run: Any) -> None:
    run = make_run(scaled(read=lambda view: type(view).const))

    with pytest.raises(AttributeError, match=r"is a field: read it as `self\.const`"):
        run.validate()


def test_view_is_an_instance_of_the_experiment_and_frozen(scaled: Any, make_run: Any) -> None:
    def read(view: Any) -> float:
        assert isinstance(view, Scaled)
        assert "const=3.0" in repr(view)
        with pytest.raises(AttributeError, match="cannot assign to field"):
            view.const = 2.0
        return 1.0

    make_run(scaled(read=read)).validate()


def test_host_side_hooks_see_host_fields(plane: Any, make_run: Any) -> None:
    class Hosted(plane):
        path: str = "here"

        def build_model(self, rngs: Any) -> Any:
            assert self.path == "here"
            return super().build_model(rngs)

        def metrics(self, height: Any, *, y: Any) -> Any:
            return {self.path: (abs(height - y).sum(), len(y))}

        def finalize_metrics(self, reduced: Any, split: str) -> Any:
            return {"name": self.path, **reduced}

    assert list(make_run(Hosted()).validate()) == ["name", "here"]


def test_only_structural_values_make_new_programs(scaled: Any, make_run: Any) -> None:
    def read(view: Any) -> Any:
        return view.const * view.device

    make_run(scaled(read=read)).train()
    before = nitro.cache_stats()["misses"]

    make_run(scaled(read=read, device=0.1, host=7.0), seed=3, max_epochs=2).train()
    without = nitro.cache_stats()["misses"]
    make_run(scaled(read=read, const=4.0)).train()

    assert without == before
    assert nitro.cache_stats()["misses"] > without
