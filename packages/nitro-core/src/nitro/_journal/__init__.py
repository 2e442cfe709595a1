"""What a run leaves in plain files and tables; reading it needs no JAX."""

from ._endings import Ending, ending
from ._history import HISTORY_KEYS, History
from ._plot import plot_histories, plot_history
from ._run_file import (
    RUN_FILE_NAME,
    RunFile,
    RunFileWriter,
    earlier_runs,
    find_runs,
    read_run_file,
    read_runs,
    set_run_file_aside,
)
from ._tables import Report, Section, Table, format_columns

__all__ = [
    "HISTORY_KEYS",
    "RUN_FILE_NAME",
    "Ending",
    "History",
    "Report",
    "RunFile",
    "RunFileWriter",
    "Section",
    "Table",
    "earlier_runs",
    "ending",
    "find_runs",
    "format_columns",
    "plot_histories",
    "plot_history",
    "read_run_file",
    "read_runs",
    "set_run_file_aside",
]
