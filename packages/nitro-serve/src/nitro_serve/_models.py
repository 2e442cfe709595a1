"""The models of a folder: found, loaded beside what is served, and swapped in when ready."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nitro.errors import BundleError, NitroError, did_you_mean
from nitro_export_stablehlo import IOSpec, check_golden, load_bundle

from ._batcher import Arrays, Batcher, BatchPlan, Timing
from ._kserve_types import describe
from ._metrics import Statistics, set_ready
from ._refusals import Kind, RefusedError, as_refusal
from ._repository import newest_version

logger = logging.getLogger("nitro.serve")

_TIMED_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What the server allows.

    Attributes:
        batching: Whether waiting requests are joined.
        postprocess: Whether a bundle's post-processing code runs.
        untrusted: Whether programs are tried in a child process before they are loaded.
        max_body_bytes: The most bytes of one request.
        max_rows: The most rows of one request.
        max_waiting: The most requests that wait for one model.
        timeout_s: How long a request may take that asks for no other limit, in seconds.
    """

    batching: bool = True
    postprocess: bool = False
    untrusted: bool = False
    max_body_bytes: int = 64 * 2**20
    max_rows: int = 4096
    max_waiting: int = 1024
    timeout_s: float = 60.0


class ServedModel:
    """One version of a model, loaded, checked and warm; made in a thread, used by the loop.

    Attributes:
        name: The model's name.
        version: Its version.
        bundle: What is served.
        statistics: What it has done.
        costs: The seconds that a call takes, by compiled size.
        max_batch_size: The most rows that are joined; 0 where requests run one by one.
    """

    def __init__(self, name: str, version: str, path: Path, options: ServeOptions) -> None:
        self.name = name
        self.version = version
        self.bundle = load_bundle(path, untrusted=options.untrusted)
        if self.bundle.name != name:
            raise BundleError(
                f"The bundle in `{path}` calls itself `{self.bundle.name}`.",
                expected=f"the directory's name, `{name}`",
                fix="rename the directory",
            )
        check_golden(self.bundle)
        self._postprocess = self.bundle.load_postprocess() if options.postprocess else None
        self._options = options
        self.statistics = Statistics(name, version)
        self.costs = self._warm()
        plan = self._plan()
        self.max_batch_size = plan.max_rows
        self._batcher = Batcher(self._run, plan, on_call=self.statistics.count_call)

    @property
    def inputs(self) -> tuple[IOSpec, ...]:
        """What a client sends."""
        return self.bundle.inputs

    @property
    def outputs(self) -> tuple[IOSpec, ...]:
        """What a client gets."""
        return self.bundle.outputs if self._postprocess is None else self.bundle.client_outputs

    def metadata(self) -> dict[str, Any]:
        """The protocol's model metadata."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "nitro_stablehlo",
            "inputs": [describe(spec) for spec in self.inputs],
            "outputs": [describe(spec) for spec in self.outputs],
        }

    async def predict(
        self, inputs: Arrays, *, timeout_s: float | None = None
    ) -> tuple[Arrays, Timing]:
        """The outputs for one request, which is checked before it waits with others.

        Raises:
            RefusedError: Inputs that do not fit, too many rows, a full queue, no time left.
        """
        try:
            rows = self.bundle.count_rows(**inputs)
            if rows > self._options.max_rows:
                raise RefusedError(
                    Kind.TOO_LARGE,
                    f"The request has {rows} rows.",
                    expected=f"at most {self._options.max_rows}",
                    fix="send it in parts; the limit is --max-rows",
                )
            limit = self._options.timeout_s
            outputs, timing = await self._batcher.submit(
                inputs, max(rows, 1), timeout_s=limit if timeout_s is None else timeout_s
            )
            if self._postprocess is not None:
                outputs = self._postprocess(outputs)
        except Exception as error:
            refusal = as_refusal(error)
            if refusal.kind is Kind.INTERNAL:
                logger.exception("%s failed on a request", self.name)
            raise refusal from error
        self.statistics.count_success(timing.queue_s)
        return outputs, timing

    async def retire(self) -> None:
        """Answers what waits, then ends; called when another version has taken its place."""
        await self._batcher.drain()
        self._batcher.close()

    def _run(self, inputs: Arrays) -> Arrays:
        return self.bundle(**inputs)

    def _plan(self) -> BatchPlan:
        inputs, outputs = self.bundle.inputs, self.bundle.outputs
        can_join = all(spec.batch_axis0 is not None for spec in (*inputs, *outputs))
        joins = can_join and self._options.batching
        return BatchPlan(
            max_rows=max(self.bundle.batch_sizes) if joins else 0,
            input_axes0=_axes(inputs),
            output_axes0=_axes(outputs),
            cost_s=self.costs,
            max_waiting=self._options.max_waiting,
        )

    def _warm(self) -> dict[int, float]:
        """Runs every compiled size; returns the seconds that a call takes, by size.

        Where sizes are symbolic, the golden inputs have warmed the programs, and how long a
        call takes depends on the request.
        """
        if any(spec.symbolic_sizes for spec in self.bundle.inputs):
            return {}
        return {size: self._time_call(size) for size in self.bundle.batch_sizes}

    def _time_call(self, rows: int) -> float:
        zeros = {s.name: np.zeros(s.sizes(rows), s.numpy_dtype) for s in self.bundle.inputs}
        self._run(zeros)
        seconds: list[float] = []
        for _ in range(_TIMED_CALLS):
            started = time.perf_counter()
            self._run(zeros)
            seconds.append(time.perf_counter() - started)
        return min(seconds)


def _axes(specs: tuple[IOSpec, ...]) -> Mapping[str, int]:
    return {spec.name: spec.batch_axis0 for spec in specs if spec.batch_axis0 is not None}


@dataclass(kw_only=True)
class Entry:
    """A model of the folder, whether or not it can be served.

    Attributes:
        name: The model's name: its directory's.
        path: The bundle that was looked at last.
        state: `"LOADING"`, `"READY"` or `"UNAVAILABLE"`.
        reason: Why it is unavailable, or why a newer bundle was not taken; else empty.
        model: What is served, or None.
        seen: What the files looked like when they were loaded.
        loads: How often it was loaded.
    """

    name: str
    path: Path
    state: str = "LOADING"
    reason: str = ""
    model: ServedModel | None = None
    seen: object = None
    loads: int = 0


class ModelStore:
    """All models of a folder.

    The folder holds bundles, or is a Triton model repository: then the newest version of
    each model is served. A broken bundle makes its own model unavailable and no other; one
    that replaces a sound bundle changes nothing but the reason that the index shows.

    Args:
        folder: The folder.
        options: What the server allows.
    """

    def __init__(self, folder: Path, options: ServeOptions) -> None:
        self.folder = folder
        self.options = options
        self.entries: dict[str, Entry] = {}
        self.is_loaded = False
        # One load at a time: compiling takes all cores anyway.
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="nitro-serve-loader")
        self._retiring: set[asyncio.Task[None]] = set()

    def find(self) -> dict[str, tuple[Path, str]]:
        """The bundles of the folder: path and version by name."""
        found: dict[str, tuple[Path, str]] = {}
        for child in sorted(self.folder.iterdir()):
            if child.name.startswith(".") or not child.is_dir():
                continue
            version = newest_version(child)
            if (child / "manifest.yaml").is_file():
                found[child.name] = child, ""
            elif version is not None and (child / str(version) / child.name).is_dir():
                found[child.name] = child / str(version) / child.name, str(version)
        return found

    async def load_all(self) -> None:
        """Loads every model, one after the other; those that fail are in the index."""
        for name in self.find():
            try:
                await self.load(name)
            except RefusedError as refusal:
                logger.error("%s cannot be served: %s", name, refusal)
        self.is_loaded = True

    async def load(self, name: str) -> None:
        """Loads a model of the folder, anew if it is served, and swaps it in when it is warm.

        Requests that are in flight end on the version that they began on.

        Raises:
            RefusedError: There is no such model, or its bundle cannot be served.
        """
        found = self.find()
        if name not in found:
            raise _unknown(name, found)
        path, version = found[name]
        entry = self.entries.setdefault(name, Entry(name=name, path=path))
        seen = _looks(path)
        version = version or str(entry.loads + 1)
        loop = asyncio.get_running_loop()
        try:
            model = await loop.run_in_executor(
                self._loader, ServedModel, name, version, path, self.options
            )
        except (NitroError, OSError) as error:
            self._keep_old(entry, str(error))
            raise RefusedError(
                Kind.INVALID,
                f"`{name}` was not loaded: {error}",
                fix="mend the bundle, and load again",
            ) from error
        except Exception as error:
            self._keep_old(entry, f"{type(error).__name__}: {error}")
            raise as_refusal(error) from error
        old, entry.model = entry.model, model
        entry.path, entry.seen, entry.reason = path, seen, ""
        entry.loads += 1
        entry.state = "READY"
        set_ready(name, is_ready=True)
        logger.info("%s version %s is ready", name, version)
        self._retire(old)

    def unload(self, name: str) -> None:
        """Stops serving a model; requests in flight are still answered.

        Raises:
            RefusedError: There is no such model.
        """
        entry = self.entries.get(name)
        if entry is None or entry.model is None:
            raise _unknown(name, [e.name for e in self.entries.values() if e.model is not None])
        old, entry.model = entry.model, None
        entry.state, entry.reason = "UNAVAILABLE", "unloaded"
        set_ready(name, is_ready=False)
        self._retire(old)

    async def refresh(self) -> None:
        """Loads what has changed in the folder, and unloads what is gone."""
        found = self.find()
        for name in [n for n, e in self.entries.items() if n not in found and e.model is not None]:
            self.unload(name)
        for name, (path, _) in found.items():
            entry = self.entries.get(name)
            looks = _looks(path)
            if entry is not None and entry.seen == looks:
                continue
            try:
                await self.load(name)
            except RefusedError as refusal:
                logger.error("%s: %s", name, refusal)
                self.entries[name].seen = looks

    def get(self, name: str, version: str = "") -> ServedModel:
        """The model that serves a name.

        Args:
            name: The model's name.
            version: The version that a client asks for; empty for the one that is served.

        Raises:
            RefusedError: No such model or version, or one that is not ready.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise _unknown(name, self.entries)
        if entry.model is None:
            raise RefusedError(
                Kind.UNAVAILABLE,
                f"The model `{name}` is not ready: {entry.reason or 'it is being loaded'}.",
            )
        if version and version != entry.model.version:
            raise RefusedError(
                Kind.NOT_FOUND,
                f"The model `{name}` has no version `{version}` here.",
                expected=f"the version {entry.model.version}, or none in the request",
            )
        return entry.model

    def is_ready(self) -> bool:
        """Whether every model was looked at, and at least one is served."""
        return self.is_loaded and bool(self.served())

    def served(self) -> list[ServedModel]:
        """The models that answer requests."""
        return [entry.model for entry in self.entries.values() if entry.model is not None]

    def index(self) -> list[dict[str, str]]:
        """The protocol's repository index: every model of the folder, with its state."""
        return [
            {
                "name": entry.name,
                "version": entry.model.version if entry.model else "",
                "state": entry.state,
                "reason": entry.reason,
            }
            for entry in sorted(self.entries.values(), key=lambda entry: entry.name)
        ]

    async def drain(self) -> None:
        """Waits until every request is answered."""
        await asyncio.gather(*(model.retire() for model in self.served()), *self._retiring)
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _keep_old(self, entry: Entry, reason: str) -> None:
        entry.reason = reason
        if entry.model is None:
            entry.state = "UNAVAILABLE"
            set_ready(entry.name, is_ready=False)

    def _retire(self, model: ServedModel | None) -> None:
        if model is not None:
            task = asyncio.create_task(model.retire())
            del model
            self._retiring.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Frees a retired model now: its programs hold on to each other, and are large."""
        self._retiring.discard(task)
        asyncio.get_running_loop().run_in_executor(None, gc.collect)


def _unknown(name: str, names: Any) -> RefusedError:
    return RefusedError(
        Kind.NOT_FOUND, f"There is no model `{name}` here.", expected=did_you_mean(name, names)
    )


def _looks(bundle: Path) -> object:
    """What tells one bundle from the next without reading it: its index file and directory."""
    marks: list[tuple[int, int, int]] = []
    for path in (bundle, bundle / "nitro.json"):
        try:
            status = path.stat()
        except OSError:
            continue
        marks.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return str(bundle), tuple(marks)
