"""Where an artifact comes from, collected without being asked."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from nitro._run import Session
from nitro._version import __version__
from nitro.errors import ConfigError, warn

# A patch that `git apply` takes, however the user likes to see differences.
_PLAIN_DIFF = (
    *("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false", "-c", "diff.relative=false"),
    *("diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-color"),
)
_REPOSITORY_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
_MAX_PATCH_BYTES = 20 * 2**20
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
        "exported_at": export_time(),
        **{f"{name}_version": metadata.version(name) for name in _PACKAGES},
    }
    root = _source_folder(session)
    if root is None:
        return facts, None
    git, patch = _git_facts(root)
    return {**facts, **git}, patch


def export_time() -> str:
    """The time that an artifact is stamped with, in UTC, as `"2026-11-30T08:15:00Z"`.

    It is now, or what `SOURCE_DATE_EPOCH` says: seconds since 1970, by which builds that must
    be repeatable to the byte fix their dates (https://reproducible-builds.org/specs/source-date-epoch/).

    Raises:
        ConfigError: `SOURCE_DATE_EPOCH` is set and is not such a number.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if text is None:
        moment = datetime.now(UTC)
    else:
        try:
            moment = datetime.fromtimestamp(int(text), UTC)
        except (ValueError, OverflowError, OSError) as error:
            raise ConfigError(
                f"`SOURCE_DATE_EPOCH` is {text!r}.",
                expected="whole seconds since 1970, such as 1767225600",
                fix="set it to the output of `git log -1 --format=%ct`, or unset it",
            ) from error
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


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
    patch = _git(folder, *_PLAIN_DIFF, "HEAD") or b""
    status = _git(folder, "status", "--porcelain")
    remote = _text(folder, "remote", "get-url", "origin")
    facts = {
        "git_commit": commit.decode().strip(),
        "git_tree_sha1": _text(folder, "rev-parse", "HEAD^{tree}"),
        "git_branch": _text(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "repo_remote": None if remote is None else _without_password(remote),
        "git_dirty": None if status is None else bool(status.strip()),
    }
    return {name: fact for name, fact in facts.items() if fact is not None}, _kept(patch, folder)


def _kept(patch: bytes, folder: Path) -> bytes | None:
    """The patch, unless it is empty or too large to travel with each artifact."""
    if len(patch) > _MAX_PATCH_BYTES:
        warn(
            f"The uncommitted changes around `{folder}` are a patch of {len(patch):,} bytes, which "
            f"is not kept with the artifact: the limit is {_MAX_PATCH_BYTES:,}.\n"
            "  fix: commit them, or have git ignore large files, so that the artifact says what it "
            "was made from"
        )
        return None
    return patch or None


def _text(folder: Path, *arguments: str) -> str | None:
    output = _git(folder, *arguments)
    # Names of branches and remotes are bytes, of any encoding.
    return None if output is None else output.decode(errors="replace").strip()


def _without_password(remote: str) -> str:
    """A remote's address without what lets its holder in: an artifact goes to others.

    Tokens are passwords, and over HTTP users as well.
    """
    scheme, separator, rest = remote.partition("://")
    user, at, place = rest.rpartition("@")
    if not separator or not at or "/" in user:
        return remote
    kept = "" if scheme.startswith("http") else user.partition(":")[0] + "@"
    return f"{scheme}://{kept}{place}"


def _git(folder: Path, *arguments: str) -> bytes | None:
    # A hook of git, for one, runs with variables that name another repository.
    environment = {k: v for k, v in os.environ.items() if k not in _REPOSITORY_VARIABLES}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, check=False
        )
    except FileNotFoundError:
        return None  # no git on this machine
    return done.stdout if done.returncode == 0 else None
