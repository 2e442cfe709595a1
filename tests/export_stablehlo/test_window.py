"""`nitro-bundle verify` against the installed JAX: facts first, the age as a hint."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax.export
import pytest
from jax.extend.mlir.dialects import stablehlo

from nitro.export import ExportProgram
from nitro_export_stablehlo import StableHLOBackend
from nitro_export_stablehlo._verify import Report, verify_bundle

_JAXLIB = importlib.metadata.version("jaxlib")

Verify = Callable[..., Report]


@pytest.fixture
def verify(copy_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Verifies a bundle of this age, whose index was edited; its programs count as sound."""
    monkeypatch.setattr("nitro_export_stablehlo._verify.find_unsafe_programs", lambda *_, **__: {})

    def verify(days: float = 0, **changed: Any) -> Report:
        exported_at = (datetime.now(UTC) - timedelta(days=days)).strftime("%Y-%m-%dT%H:%M:%SZ")

        def edit(path: Path) -> None:
            text = (path / "manifest.yaml").read_text()
            told = f'"exported_at": "{exported_at}"'
            (path / "manifest.yaml").write_text(re.sub(r'"exported_at": ".*"', told, text))

        def edit_index(index: dict[str, Any]) -> None:
            index["versions"] |= changed.pop("versions", {})
            index.update(changed)

        return verify_bundle(copy_bundle("mlp", edit=edit, edit_index=edit_index))

    return verify


@pytest.mark.parametrize("days", [0, 149])
def test_a_bundle_of_the_installed_jax_needs_no_note(verify: Verify, days: int) -> None:
    report = verify(days)

    assert report == Report()


def test_the_same_jax_reads_a_bundle_of_any_age(verify: Verify) -> None:
    report = verify(1000)

    assert report.violations == []
    (note,) = report.notes
    assert f"1000 days old; the installed jaxlib {_JAXLIB} wrote it, so it reads it" in note
    assert "a newer jaxlib may not" in note


def test_an_older_jax_and_a_young_bundle_need_no_note(verify: Verify) -> None:
    assert verify(149, versions={"jaxlib": "0.9.9"}) == Report()


@pytest.mark.parametrize(("written_by", "told"), [("0.9.9", "0.9.9"), ("", "not named")])
def test_an_older_jax_and_an_old_bundle_are_a_note(
    verify: Verify, written_by: str, told: str
) -> None:
    report = verify(150, versions={"jaxlib": written_by})

    assert report.violations == []
    (note,) = report.notes
    assert f"150 days old, and an older jaxlib, {told}, wrote it" in note
    assert f"180 days between two releases: the installed {_JAXLIB} may be beyond that" in note


@pytest.mark.parametrize("days", [0, 1000])
def test_a_newer_jax_is_a_note_at_any_age(verify: Verify, days: int) -> None:
    report = verify(days, versions={"jaxlib": "99.0.0"})

    assert report.violations == []
    (note,) = report.notes
    assert f"jaxlib 99.0.0 wrote the bundle, and {_JAXLIB} is installed" in note
    assert "three weeks" in note


def test_a_calling_convention_that_is_not_read_is_a_violation(verify: Verify) -> None:
    newest = jax.export.maximum_supported_calling_convention_version

    report = verify(calling_convention_version=newest + 1)

    (violation,) = report.violations
    assert f"in the calling convention {newest + 1}; expected: from " in violation
    assert f" to {newest}, which the installed jax" in violation


def test_the_oldest_calling_convention_is_a_note(
    programs: dict[str, ExportProgram], tmp_path: Path
) -> None:
    oldest = jax.export.minimum_supported_calling_convention_version
    assert oldest < jax.export.maximum_supported_calling_convention_version
    path = tmp_path / "mlp"
    path.mkdir()
    StableHLOBackend().write(programs["mlp"], path, calling_convention_version=oldest)

    report = verify_bundle(path)

    assert report.violations == []
    (note,) = report.notes
    assert f"calling convention {oldest}, the oldest that jax" in note


@pytest.mark.parametrize("version", ["0.1.0", "99.1.0"])
def test_a_stablehlo_that_is_not_read_is_a_violation(verify: Verify, version: str) -> None:
    report = verify(versions={"stablehlo_target": version})

    first = report.violations[0]
    assert f"in StableHLO {version}; expected: from {stablehlo.get_minimum_version()} to " in first
    assert stablehlo.get_current_version() in first
