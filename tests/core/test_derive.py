from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import nitro
from nitro import Device, GraphConst
from nitro._run._derive import decode_derived, encode_derived
from nitro.errors import HookError, NitroWarning


@dataclass(frozen=True)
class Stats:
    mean: Device[float] = 0.0


class Weighted(nitro.Experiment):
    """Takes a weight, a count and a name from the data."""

    weight: Device[Any] = 0.0
    count: GraphConst[int] = 0
    names: tuple[str, ...] = ()
    scale: float = 1.0

    def derive(self, data: Any) -> Any:
        y = np.concatenate([batch["y"] for batch in data["train"]])
        return {
            "weight": np.float32(self.scale * abs(y).mean()),
            "count": int(y.size),
            "names": ("a", "b"),
        }


@pytest.fixture
def weighted(plane: Any) -> type:
    class WeightedPlane(Weighted, plane):
        def loss(self, height: Any, *, y: Any) -> Any:
            return self.weight * self.count * super().loss(height, y=y)

    return WeightedPlane


def test_derived_values_are_merged_and_reach_the_device(weighted: Any, make_run: Any) -> None:
    run = make_run(weighted())

    y = run.experiment.build_data()["train"].arrays["y"]
    assert run.experiment.count == 20  # four whole batches of five
    assert run.experiment.names == ("a", "b")
    assert run.device_value("weight") == pytest.approx(abs(y).mean(), rel=0.3)
    assert weighted().count == 0


def test_derived_device_value_is_in_no_key(weighted: Any, make_run: Any) -> None:
    first = make_run(weighted()).validate()["val_loss"]
    before = nitro.cache_stats()["misses"]

    second = make_run(weighted(scale=2.0)).validate()["val_loss"]

    assert second == pytest.approx(2 * first, rel=1e-6)
    assert nitro.cache_stats()["misses"] == before


def test_group_is_derived_by_dotted_name(plane: Any, make_run: Any) -> None:
    class Grouped(plane):
        stats: Stats = Stats()

        def derive(self, data: Any) -> Any:
            return {"stats.mean": 2.0}

    run = make_run(Grouped())

    assert run.experiment.stats == Stats(mean=2.0)
    assert run.device_value("stats.mean") == np.float32(2)


def test_weights_of_a_record_bring_the_derived_values(
    weighted: Any, make_run: Any, tmp_path: Any
) -> None:
    class Once(weighted):
        def derive(self, data: Any) -> Any:
            return {**super().derive(data), "names": ("c",), "weight": np.float32([0.1, 0.2]).sum()}

    trained = make_run(Once()).train()

    class Never(weighted):
        def derive(self, data: Any) -> Any:
            raise AssertionError("called")

    Never.__name__ = "Once"
    served = make_run(Never(), checkpoint=trained.run_dir, data={}, run_dir=tmp_path / "other")

    assert (served.experiment.count, served.experiment.names) == (20, ("c",))
    assert served.device_value("weight") == trained.device_value("weight")
    x = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(served.predict({"x": x}), trained.predict({"x": x}))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        "text",
        (1, (2.0, "a")),
        [1, None],
        {"a": (1,), "b": {"c": 2}},
        np.float32(0.1),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 3)),
    ],
)
def test_derived_value_comes_back_from_json_as_it_was(value: Any) -> None:
    encoded = json.loads(json.dumps(encode_derived({"field": value})))
    decoded = decode_derived(encoded, "restored")["field"]

    if hasattr(value, "dtype"):
        assert (decoded.dtype, decoded.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(decoded, value)
    else:
        assert decoded == value
        assert type(decoded) is type(value)


def test_value_that_a_record_cannot_hold_is_told_when_the_weights_are_taken() -> None:
    encoded = encode_derived({"names": (object(),), "count": 3})

    with pytest.warns(NitroWarning, match="derived values of names, which a record cannot hold"):
        assert decode_derived(encoded, "restored from runs/x") == {"count": 3}


def test_resumed_run_derives_again_and_tells_what_changed(weighted: Any, make_run: Any) -> None:
    make_run(weighted()).train()

    with (
        pytest.warns(NitroWarning, match="derive` gives weight another value than when"),
        pytest.warns(NitroWarning, match=r"scale: 1\.0 → 3\.0"),
    ):
        run = make_run(weighted(scale=3.0), resume="auto", max_epochs=2)

    assert run.step == 4


@pytest.mark.parametrize(
    ("derived", "words"),
    [
        (5, r"int[\s\S]*mapping of fields"),
        ({"wieght": 1}, r"no field `wieght`[\s\S]*did you mean `weight`"),
        ({"count": 1.5}, r"`Wrong\.count` is 1\.5[\s\S]*declared type int"),
        ({"seed": 1}, r"run option `seed`[\s\S]*resolved before the data"),
    ],
)
def test_derived_values_that_fit_no_field_are_refused(
    weighted: Any, make_run: Any, derived: Any, words: str
) -> None:
    wrong = type("Wrong", (weighted,), {"derive": lambda self, data: derived})

    with pytest.raises(HookError, match=rf"`Wrong\.derive` returned[\s\S]*{words}"):
        make_run(wrong())
