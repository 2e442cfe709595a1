from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

import nitro
from nitro import GraphConst
from nitro.errors import ConfigError, ExperimentError


@dataclass(frozen=True)
class Sizes:
    width: GraphConst[int] = 1
    depth: GraphConst[int] = 1


class Preset(nitro.Experiment):
    width: GraphConst[int] = 8
    rate: float = 0.1
    max_epochs: int = 1
    sizes: Sizes = Sizes()

    @classmethod
    def presets(cls) -> dict[str, dict[str, Any]]:
        return {"small": {"width": 2, "sizes.width": 3}, "long": {"max_epochs": 5}}


@pytest.fixture
def preset(plane: Any) -> type:
    class PresetPlane(Preset, plane):
        pass

    return PresetPlane


def test_overrides_beat_the_preset_and_that_the_defaults() -> None:
    small = Preset.from_preset("small", rate=0.5)
    overridden = Preset.from_preset("small", width=4, **{"sizes.depth": 7})

    assert (small.width, small.rate, small.sizes) == (2, 0.5, Sizes(3, 1))
    assert (overridden.width, overridden.sizes) == (4, Sizes(3, 7))
    assert Preset.from_preset("small", sizes=Sizes(9, 9)).sizes == Sizes(9, 9)


def test_presets_are_inherited_by_merging() -> None:
    class More(Preset):
        @classmethod
        def presets(cls) -> dict[str, dict[str, Any]]:
            base = super().presets()
            return {**base, "tiny": {**base["small"], "width": 1}}

    assert More.from_preset("tiny").sizes == Sizes(3, 1)
    assert More.from_preset("long").max_epochs == 5


@pytest.mark.parametrize(
    ("presets", "name", "error", "words"),
    [
        ({"small": {}}, "smal", ConfigError, r"no preset 'smal'[\s\S]*did you mean `small`"),
        ({}, "small", ConfigError, r"no preset 'small'[\s\S]*declare them[\s\S]*def presets"),
        ([], "small", ExperimentError, r"`Bad\.presets` \(.*\) returned list"),
        ({"small": 3}, "small", ExperimentError, "has int for the preset `small`"),
        (
            {"small": {"widht": 3}},
            "small",
            ExperimentError,
            r"preset `small` of `Bad\.presets` .*no field `widht`[\s\S]*`width`",
        ),
    ],
)
def test_preset_that_cannot_be_used_is_refused(
    presets: Any, name: str, error: type[Exception], words: str
) -> None:
    bad = type("Bad", (Preset,), {"presets": classmethod(lambda cls: presets)})

    with pytest.raises(error, match=words):
        bad.from_preset(name)


def test_handle_of_a_preset_records_its_name(preset: Any, tmp_path: Any) -> None:
    run = nitro.Nitro.from_preset(preset, "small", width=4, run_dir=tmp_path)
    run.train()

    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    params = next(line for line in lines if line["type"] == "params")
    assert run.preset == "small"
    assert (run.experiment.width, run.experiment.sizes.width) == (4, 3)
    assert params["preset"] == "small"
    assert "preset `small`" in str(run.binding)
    record = nitro._checkpoint.open_record(tmp_path)
    assert record.meta["preset"] == "small"


def test_experiment_of_a_preset_records_nothing(preset: Any, make_run: Any) -> None:
    run = make_run(preset.from_preset("small"))

    assert run.preset is None
    assert "preset `" not in str(run.binding)


def test_name_of_an_option_and_a_field_is_the_option(preset: Any, tmp_path: Any) -> None:
    run = nitro.Nitro.from_preset(preset, "long", max_epochs=2, run_dir=tmp_path)

    assert run.experiment.max_epochs == 5
    assert "max_epochs = 2 (keyword)" in str(run.binding)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"widht": 3}, r"neither an option of `Nitro` nor a field[\s\S]*`seed`[\s\S]*`width`\?"),
        ({"preset": "long"}, r"two presets, 'small' and 'long'"),
        (
            {"data": {}, "width": 4, "seed": 2},
            r"another experiment[\s\S]*"
            r"`Nitro\(PresetPlane\.from_preset\('small', width=4\), data=\.\.\., seed=\.\.\.\)`",
        ),
    ],
)
def test_keyword_that_a_preset_cannot_take_is_refused(
    preset: Any, keywords: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        nitro.Nitro.from_preset(preset, "small", **keywords)


def test_preset_of_an_instance_is_refused(preset: Any) -> None:
    with pytest.raises(ExperimentError, match=r"from_preset` got PresetPlane\("):
        nitro.Nitro.from_preset(preset(), "small")


def test_switching_presets_compiles_only_for_structural_values(preset: Any, tmp_path: Any) -> None:
    nitro.Nitro.from_preset(preset, "small", run_dir=tmp_path, width=8).validate()
    before = nitro.cache_stats()["misses"]

    nitro.Nitro.from_preset(preset, "long", run_dir=tmp_path).validate()

    assert nitro.cache_stats()["misses"] == before
