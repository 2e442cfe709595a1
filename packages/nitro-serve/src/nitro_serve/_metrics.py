"""What the server counts, for Prometheus and for the protocol's statistics."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from ._refusals import Kind

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_REQUESTS = Counter("nitro_requests", "Requests that a model answered.", ["model", "version"])
_ERRORS = Counter("nitro_request_errors", "Requests refused or failed.", ["model", "kind"])
_QUEUE = Histogram(
    "nitro_queue_seconds", "From a request's arrival to its call.", ["model"], buckets=_SECONDS
)
_COMPUTE = Histogram(
    "nitro_compute_seconds", "The time of one call of a model.", ["model"], buckets=_SECONDS
)
_BATCH = Histogram("nitro_batch_rows", "The rows of one call of a model.", ["model"], buckets=_ROWS)
_READY = Gauge("nitro_model_ready", "1 where the model answers requests.", ["model"])


@dataclass
class Statistics:
    """What one version of a model has done since it was loaded.

    Attributes:
        model: The model's name.
        version: Its version.
        successes: Requests that were answered.
        failures: Requests that were refused or failed.
        queue_s: The seconds that answered requests waited, together.
        rows: The rows of all calls.
        calls: The calls, by their rows.
        compute_s: The seconds of all calls, by their rows.
        last_inference_s: When the last request was answered, in seconds since the epoch.
    """

    model: str
    version: str
    successes: int = 0
    failures: int = 0
    queue_s: float = 0.0
    rows: int = 0
    calls: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    compute_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    last_inference_s: float = 0.0

    def __post_init__(self) -> None:
        # Finding a child of a metric by its labels costs as much as a small prediction.
        self._requests = _REQUESTS.labels(self.model, self.version)
        self._queue = _QUEUE.labels(self.model)
        self._compute = _COMPUTE.labels(self.model)
        self._batch = _BATCH.labels(self.model)

    def count_call(self, rows: int, seconds: float) -> None:
        """Counts one call of the model."""
        self.calls[rows] += 1
        self.compute_s[rows] += seconds
        self.rows += rows
        self._compute.observe(seconds)
        self._batch.observe(rows)

    def count_success(self, queue_s: float) -> None:
        """Counts a request that was answered."""
        self.successes += 1
        self.queue_s += queue_s
        self.last_inference_s = time.time()
        self._requests.inc()
        self._queue.observe(queue_s)

    def count_failure(self, kind: Kind) -> None:
        """Counts a request that was not."""
        self.failures += 1
        _ERRORS.labels(self.model, kind.name.lower()).inc()

    def to_json(self) -> dict[str, Any]:
        """The entry of the protocol's statistics extension; durations in nanoseconds."""
        compute_s = sum(self.compute_s.values())
        return {
            "name": self.model,
            "version": self.version,
            "last_inference": int(self.last_inference_s * 1e3),
            "inference_count": self.rows,
            "execution_count": sum(self.calls.values()),
            "inference_stats": {
                "success": _duration(self.successes, self.queue_s + compute_s),
                "fail": _duration(self.failures, 0.0),
                "queue": _duration(self.successes, self.queue_s),
                "compute_infer": _duration(self.successes, compute_s),
            },
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_infer": _duration(self.calls[rows], self.compute_s[rows]),
                }
                for rows in sorted(self.calls)
            ],
        }


def count_failure(statistics: Statistics | None, kind: Kind) -> None:
    """Counts a request that was refused or failed.

    Args:
        statistics: Those of its model; None where there is no such model: a name that a
            client made up becomes no label.
        kind: Why.
    """
    if statistics is None:
        _ERRORS.labels("", kind.name.lower()).inc()
    else:
        statistics.count_failure(kind)


def set_ready(model: str, *, is_ready: bool) -> None:
    """Publishes whether a model answers requests."""
    _READY.labels(model).set(int(is_ready))


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
