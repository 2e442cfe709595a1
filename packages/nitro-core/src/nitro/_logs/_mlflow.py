"""MLflow: a local folder, or a tracking server."""

from __future__ import annotations

import copy
import http.client
import importlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from nitro.errors import CheckpointError, ConfigError, MissingPackageError

from ._json_lines import plain
from ._names import StoredNames
from ._protocol import FinishStatus

_ANSWERS_WITHIN_S = 5
_MOST_BUFFERED = 500
_LONGEST_PARAM = 6000
_PARAMS_PER_CALL = 100
_ALLOW_FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"


class MLflowLogger:
    """Logs to MLflow: scalars as `train/loss`, by optimizer step.

    Steps are sent in batches: at the end of each epoch, and every 500 values. A resumed
    run continues the same MLflow run. MLflow cannot delete points: those that were logged
    after the record stay, and the steps that are taken again log theirs beside them. MLflow
    cannot change parameters either: one that differs on resume becomes the tag
    `changed.<name>`.

    Args:
        experiment: The MLflow experiment; None takes the name of the run's directory.
        tracking_uri: A server, or a local folder; None takes `MLFLOW_TRACKING_URI`, else the
            folder `mlruns`. For a folder, `MLFLOW_ALLOW_FILE_STORE=true` is set in the
            process unless it is set already: MLflow 3 refuses folders without it.
        run_name: The run's name; None lets MLflow make one up.

    Raises:
        MissingPackageError: MLflow is not installed.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        tracking_uri: str | Path | None = None,
        run_name: str | None = None,
    ) -> None:
        self._mlflow: Any = _import_mlflow()
        self.experiment = experiment
        self.tracking_uri = str(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns")
        self.run_name = run_name
        self._client: Any = None
        self._run_id: str | None = None
        self._experiment_id: str | None = None
        self._is_open = False
        self._buffer: list[Any] = []
        self._names = StoredNames()

    def bind(self, run_dir: Path) -> Self:
        """This logger with an experiment; called by the handle."""
        if self.experiment is not None:
            return self
        bound = copy.copy(self)
        bound.experiment = run_dir.absolute().name
        return bound

    def check_ready(self) -> None:
        """Asks a server whether it is there; called at the setup of a handle that trains.

        Raises:
            ConfigError: It does not answer within seconds; MLflow itself would try for minutes.
        """
        if not self.tracking_uri.startswith(("http://", "https://")):
            return
        try:
            urllib.request.urlopen(self.tracking_uri, timeout=_ANSWERS_WITHIN_S).close()
        except urllib.error.HTTPError:
            return  # an answer, whatever it says without a login
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"The MLflow server `{self.tracking_uri}` does not answer: "
                f"{getattr(error, 'reason', error) or type(error).__name__}.",
                expected=f"an answer within {_ANSWERS_WITHIN_S} s",
                fix="start it or mend `tracking_uri`; to log locally, pass "
                '`MLflowLogger(tracking_uri="mlruns")` or leave `logger` out',
            ) from error

    @property
    def client(self) -> Any:
        """The `mlflow.MlflowClient`, for artifacts and all else that it can do."""
        if self._client is None:
            _allow_file_store(self.tracking_uri)
            self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        return self._client

    def metrics(
        self, values: Mapping[str, float], *, context: str, step: int, epoch: int, **_more: Any
    ) -> None:
        """Logs scalars as `context/name`; sends them at the end of an epoch."""
        metric = self._mlflow.entities.Metric
        now_ms = round(time.time() * 1000)
        named = {f"{context}/{name}": value for name, value in values.items()}
        if context != "train":
            named["epoch"] = epoch
        self._buffer += [
            metric(name, float(value), now_ms, step)
            for name, value in zip(self._names.of(named), named.values(), strict=True)
        ]
        if context != "train" or len(self._buffer) >= _MOST_BUFFERED:
            self._flush()

    def params(self, values: Mapping[str, Any], **_more: Any) -> None:
        """Logs the configuration as parameters; those of a resumed run stay as they are."""
        run_id = self._opened()
        known = self.client.get_run(run_id).data.params
        texts = (str(plain(value))[:_LONGEST_PARAM] for value in values.values())
        wanted = dict(zip(self._names.of(values), texts, strict=True))
        new = [
            self._mlflow.entities.Param(name, value)
            for name, value in wanted.items()
            if name not in known
        ]
        for start in range(0, len(new), _PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=new[start : start + _PARAMS_PER_CALL])
        for name, value in wanted.items():
            if name in known and known[name] != value:
                self.client.set_tag(run_id, f"changed.{name}", value)

    def tags(self, values: Mapping[str, str], **_more: Any) -> None:
        """Sets tags."""
        for name, value in zip(self._names.of(values), values.values(), strict=True):
            self.client.set_tag(self._opened(), name, str(value))

    def other(self, name: str, value: Any, **_more: Any) -> None:
        """Stores a named value as an artifact: text as it is, all else as JSON."""
        (name,) = self._names.of([name])
        if isinstance(value, str):
            self.client.log_text(self._opened(), value, f"{name}.txt")
        else:
            self.client.log_dict(self._opened(), {"value": plain(value)}, f"{name}.json")

    def figure(
        self, name: str, figure: Any, *, context: str, step: int, epoch: int, **_more: Any
    ) -> bool:
        """Stores a matplotlib figure as an artifact for each epoch."""
        del step  # the epoch says when
        path = f"figures/{context}/{name}/epoch{epoch:04d}.png"
        self.client.log_figure(self._opened(), figure, path)
        return True

    def confusion(self, matrix: Any, *, step: int, epoch: int, **_more: Any) -> None:
        """Stores a matrix as an artifact for each step."""
        content = {"step": step, "epoch": epoch, "matrix": plain(matrix)}
        self.client.log_dict(self._opened(), content, f"confusion/step{step:08d}.json")

    def finish(self, status: FinishStatus, **_more: Any) -> None:
        """Ends the MLflow run: FAILED after an error, else FINISHED; the tag says more."""
        run_id = self._opened()
        self._flush()
        self.client.set_tag(run_id, "nitro.status", status)
        self.client.set_terminated(run_id, "FAILED" if status == "failed" else "FINISHED")
        self._is_open = False

    def run_id(self) -> str | None:
        """MLflow's id of the run, once it has logged something."""
        return self._run_id

    def run_url(self) -> str | None:
        """The page of the run on a server; None for a local folder, or before it has logged."""
        if self._run_id is None or not self.tracking_uri.startswith(("http://", "https://")):
            return None
        base = self.tracking_uri.rstrip("/")
        return f"{base}/#/experiments/{self._experiment_id}/runs/{self._run_id}"

    def logger_state(self) -> Any:
        """The id of the MLflow run; None before it has logged something."""
        self._flush()
        return None if self._run_id is None else {"run_id": self._run_id}

    def reattach(self, state: Any) -> None:
        """Goes on with the same MLflow run.

        Raises:
            CheckpointError: The store does not have it.
        """
        try:
            info = self.client.get_run(state["run_id"]).info
        except self._mlflow.exceptions.MlflowException as error:
            raise CheckpointError(
                f"The run that is resumed was logged as the MLflow run {state['run_id']}, which "
                f"`{self.tracking_uri}` does not have.",
                fix="pass `MLflowLogger(tracking_uri=...)` with its store, or take the weights "
                "only with `checkpoint=`",
            ) from error
        self._run_id, self._experiment_id = info.run_id, info.experiment_id

    def _flush(self) -> None:
        if self._buffer:
            buffered, self._buffer = self._buffer, []
            self.client.log_batch(self._opened(), metrics=buffered)

    def _opened(self) -> str:
        """The id of the MLflow run, created or taken up again if need be."""
        if self._run_id is None:
            found = self.client.get_experiment_by_name(self.experiment or "nitro")
            self._experiment_id = (
                self.client.create_experiment(self.experiment or "nitro")
                if found is None
                else found.experiment_id
            )
            self._run_id = self.client.create_run(
                self._experiment_id, run_name=self.run_name
            ).info.run_id
        elif not self._is_open:
            self.client.update_run(self._run_id, status="RUNNING")
        self._is_open = True
        assert self._run_id is not None
        return self._run_id


def _import_mlflow() -> Any:
    try:
        importlib.import_module("mlflow.entities")
        return importlib.import_module("mlflow")
    except ImportError as error:
        raise MissingPackageError(
            "MLflowLogger needs MLflow, which is not installed.",
            fix='pip install "nitro-core[mlflow]"',
        ) from error


def _allow_file_store(uri: str) -> None:
    if "://" not in uri or uri.startswith("file:"):
        os.environ.setdefault(_ALLOW_FILE_STORE, "true")
