"""A new run in the directory of an earlier one: each keeps files of its own."""

from __future__ import annotations

from nitro._journal import set_run_file_aside
from nitro.errors import warn

from ._session import Session


def part_from_earlier_run(session: Session) -> None:
    """Sets log and `run.json` of an earlier run aside, and tells so, once for each handle.

    A run that continues keeps them; one that branches off has its log cut when it is attached.
    """
    earlier = session.journal.earlier_run(session)
    if earlier is None:
        return
    run_dir, source = session.setup.options.run_dir, session.setup.source
    kept = set_run_file_aside(run_dir, own=session.run_id)
    if source.resumed is not None or source.starts_over:
        return
    blank_state = getattr(session.setup.logger, "blank_state", None)
    if blank_state is not None:
        session.reattach_to, session.cuts_other_run = blank_state(), True
    warn(
        f"`{run_dir}` holds an earlier run ({earlier.in_words}), and this is a new one. The file "
        f"of the earlier one is kept as `{kept}`, a log in lines as `metrics.1.jsonl` or the next "
        "free number; its checkpoints stay.\n"
        f'  fix: pass `resume="auto"` to continue the earlier run, or another `run_dir=` to keep '
        "the two apart"
    )
