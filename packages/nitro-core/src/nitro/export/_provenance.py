"""Where an artifact comes from, collected without being asked."""

from __future__ import annotations

import inspect
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from nitro._run import Session
from nitro._version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def collect_provenance(session: Session) -> tuple[dict[str, Any], bytes | None]:
    """The facts of a run as JSON values, and the patch of a dirty source tree.

    Facts that cannot be had are left out.
    """
    facts: dict[str, Any] = {
        "nitro_version": __version__,
        "experiment": session.setup.owner,
        "config": session.config(),
        "weights": session.setup.source.display,
        **_run_facts(session),
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "exported_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **{f"{name}_version": metadata.version(name) for name in _PACKAGES},
    }
    root = _source_folder(session)
    if root is None:
        return facts, None
    git, patch = _git_facts(root)
    return {**facts, **git}, patch


def _run_facts(session: Session) -> dict[str, Any]:
    """What is known of the training that the weights come from."""
    setup, record = session.setup, session.setup.source.record
    # A handle that only looks at a record has trained nothing: the record says who did.
    if record is not None and not session.step:
        known = {name: record.meta[name] for name in ("seed", "step", "epoch", "metrics")}
        preset, run_dir = setup.preset or record.meta["preset"], record.path.parent.parent
        run_id, run_url = record.entry.run, record.meta["logger"].get("run_url")
    else:
        last = session.history.rows[-1] if session.history.rows else {}
        known = {
            "seed": setup.options.seed,
            "step": session.step,
            "epoch": session.epoch,
            "metrics": {name: value for name, value in last.items() if name != "epoch"},
        }
        preset, run_dir = setup.preset, setup.options.run_dir
        run_id = None if session.records is None else session.records.run
        run_url = setup.logger.run_url()
    known |= {"preset": preset, "run_dir": str(run_dir), "run_id": run_id, "run_url": run_url}
    return {name: fact for name, fact in known.items() if fact not in (None, {})}


def _source_folder(session: Session) -> Path | None:
    try:
        file = inspect.getsourcefile(type(session.setup.experiment))
    except (TypeError, OSError):
        return None  # a class typed at a prompt, or given to `python -c`
    return Path(file).absolute().parent if file and Path(file).exists() else None


def _git_facts(folder: Path) -> tuple[dict[str, Any], bytes | None]:
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}, None
    patch = _git(folder, "diff", "--binary", "HEAD") or b""
    status = _git(folder, "status", "--porcelain") or b""
    facts = {
        "git_commit": commit.decode().strip(),
        "git_tree_sha1": _text(folder, "rev-parse", "HEAD^{tree}"),
        "git_branch": _text(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "repo_remote": _text(folder, "remote", "get-url", "origin"),
        "git_dirty": bool(status.strip()),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}, patch or None


def _text(folder: Path, *arguments: str) -> str | None:
    output = _git(folder, *arguments)
    return None if output is None else output.decode().strip()


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        return None  # no git on this machine
    return done.stdout if done.returncode == 0 else None
