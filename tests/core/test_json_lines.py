from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nitro
from nitro import Device, GraphConst, JSONLinesLogger
from nitro.errors import ConfigError


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_logs_parameters_steps_validation_and_outcome(trained_plane: nitro.Nitro) -> None:
    lines = _lines(trained_plane.run_dir / "metrics.jsonl")

    kinds = [line["type"] if "context" not in line else line["context"] for line in lines]
    assert kinds == ["params", "other", *(["train"] * 4 + ["data", "val"]) * 6, "finish"]
    assert [line["step"] for line in lines if line.get("context") == "train"] == [*range(1, 25)]
    assert lines[2].keys() == {"type", "context", "step", "epoch", "loss"}
    assert lines[7].keys() == {"type", "context", "step", "epoch", "val_loss"}
    assert lines[-1] == {"type": "finish", "status": "completed"}


def test_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "log.jsonl")

    logger.metrics({"loss": 1.0}, context="train", step=1, epoch=1)
    seen = _lines(tmp_path / "log.jsonl")
    logger.close()

    assert seen == [{"type": "metrics", "context": "train", "step": 1, "epoch": 1, "loss": 1.0}]


def test_block_is_on_disk_as_the_lines_one_by_one_would_be(tmp_path: Path) -> None:
    columns = {"loss": [0.1, 1e-9, 3.0], 'a "b", %s {c}': [1, 2, 3], "hit": [True, False, True]}
    block = JSONLinesLogger(tmp_path / "block.jsonl")
    lines = JSONLinesLogger(tmp_path / "lines.jsonl")

    block.metrics_block(columns, context="train", first_step=8, epoch=2)
    for step in range(3):
        row = {name: column[step] for name, column in columns.items()}
        lines.metrics(row, context="train", step=8 + step, epoch=2)
    seen = (tmp_path / "block.jsonl").read_bytes()
    block.close()
    lines.close()

    assert seen == (tmp_path / "lines.jsonl").read_bytes()
    assert [line["step"] for line in _lines(tmp_path / "block.jsonl")] == [8, 9, 10]


def test_second_run_has_a_file_of_its_own(plane: Any, make_run: Any) -> None:
    first = _lines(make_run(plane()).train().run_dir / "metrics.jsonl")
    run_dir = make_run(plane()).train().run_dir

    assert [line["type"] for line in _lines(run_dir / "metrics.jsonl")].count("params") == 1
    assert _lines(run_dir / "metrics.1.jsonl") == first


def test_own_path_is_used_and_nothing_is_opened_before_training(
    plane: Any, make_run: Any, tmp_path: Path
) -> None:
    run = make_run(plane(), logger=JSONLinesLogger(tmp_path / "mine.jsonl"))
    before = (tmp_path / "mine.jsonl").exists()

    run.train()

    assert not before
    assert (tmp_path / "mine.jsonl").exists()
    assert not (run.run_dir / "metrics.jsonl").exists()


def test_no_logger_writes_no_log(plane: Any, make_run: Any) -> None:
    run = make_run(plane(), logger=None).train()

    assert not (run.run_dir / "metrics.jsonl").exists()


def test_parameters_hold_fields_and_options_but_no_arrays(plane: Any, make_run: Any) -> None:
    class Configured(plane):
        width: GraphConst[int] = 8
        rate: Device[float] = 0.5
        table: Device[Any]
        dataset: dict[str, Any]
        ratio: float = float("inf")

    dataset = {"x": np.zeros(1000), "parts": [np.ones(4, np.int8), "b"]}
    run = make_run(Configured(table=np.zeros((2, 3), np.float32), dataset=dataset), seed=3).train()

    params = _lines(run.run_dir / "metrics.jsonl")[0]
    assert params["type"] == "params"
    assert (params["width"], params["rate"], params["seed"]) == (8, 0.5, 3)
    assert params["table"] == "float32(2, 3)"
    assert params["dataset"] == {"x": "float64(1000,)", "parts": ["int8(4,)", "b"]}
    assert params["ratio"] is None


def test_other_verbs_write_typed_lines(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "log.jsonl")

    logger.tags({"owner": "me"})
    logger.other("note", {"path": Path("a"), "nan": float("nan")})
    logger.confusion(np.array([[1, 2], [3, 4]]), step=1, epoch=1)
    logger.finish("early_stop")

    assert _lines(tmp_path / "log.jsonl") == [
        {"type": "tags", "owner": "me"},
        {"type": "other", "name": "note", "value": {"path": "a", "nan": None}},
        {"type": "confusion", "step": 1, "epoch": 1, "matrix": [[1, 2], [3, 4]]},
        {"type": "finish", "status": "early_stop"},
    ]


def test_state_brings_the_file_back_to_its_length(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "log.jsonl")
    logger.metrics({"loss": 1.0}, context="train", step=1, epoch=1)
    state = logger.logger_state()
    logger.metrics({"loss": 2.0}, context="train", step=2, epoch=1)
    logger.close()

    other = JSONLinesLogger(tmp_path / "log.jsonl")
    other.reattach(json.loads(json.dumps(state)))

    assert [line["step"] for line in _lines(tmp_path / "log.jsonl")] == [1]
    assert (logger.run_id(), logger.run_url()) == (None, None)


@pytest.mark.parametrize("name", ["type", "context", "step", "epoch"])
def test_metric_named_as_a_carrier_is_refused(tmp_path: Path, name: str) -> None:
    logger = JSONLinesLogger(tmp_path / "log.jsonl")

    with pytest.raises(ConfigError, match=rf"A metric is named `{name}`[\s\S]*`{name}_value`"):
        logger.metrics({name: 1.0}, context="train", step=1, epoch=1)
    with pytest.raises(ConfigError, match=rf"A metric is named `{name}`"):
        logger.metrics_block({name: [1.0]}, context="train", first_step=1, epoch=1)


def test_field_named_type_is_refused_before_the_first_step(plane: Any, make_run: Any) -> None:
    class Typed(plane):
        type: str = "resnet"

    with pytest.raises(ConfigError, match=r"field of the experiment is named `type`"):
        make_run(Typed()).train()


def test_tag_named_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A tag is named `type`"):
        JSONLinesLogger(tmp_path / "log.jsonl").tags({"type": "a"})


def test_logger_without_a_path_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match=r'outside a run[\s\S]*JSONLinesLogger\("log\.jsonl"\)'):
        JSONLinesLogger().finish("completed")
