"""What is said where a request does not fit the run that stands in its output folder."""

from __future__ import annotations

from dataclasses import replace

from core.errors import InputError
from core.models import ModelConfig
from core.rows.spec import RowSpec
from core.run.commit_log import CommitLog
from core.run.layout import Layout
from core.run.run_info import RunInfo
from core.storage.paths import Place, place
from producer.additions import Differences
from producer.growing import Asked
from producer.selection import SELECTED


def refuse_other_run(output: Place, there: RunInfo, *, model: ModelConfig, rows: RowSpec, format_: str) -> None:
    """InputError where the run in a folder is of another model, or stores something else."""
    if not (differences := _differences_of(there, model, rows, format_)):
        return
    begun = CommitLog(Layout(place(output))).replay(there.units).count > 0
    raise InputError(
        f"{output} holds another run: " + "; ".join(differences),
        next_step=f"choose another --output, or go on with the run that is there: embq resume {output}"
        + ("" if begun else " (or remove the folder: nothing of it is committed)"),
        code="other_run",
    )


def _differences_of(there: RunInfo, model: ModelConfig, rows: RowSpec, format_: str) -> list[str]:
    old, new = there.identity(), replace(there, model=model, rows=rows, format=format_).identity()
    return [
        f"{name}: {old.get(name, 'none')} there, {new.get(name, 'none')} asked for"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


def changed(output: Place, there: RunInfo, asked: Asked, differences: Differences) -> InputError:
    """The error for inputs that say something else than when they were planned; it names the first of them."""
    more = differences.changed_count - len(differences.changed)
    wanted = dict(asked.options)
    differing = [
        f"{name}: {value or 'none'} there, {wanted[name] or 'none'} asked for"
        for name, value in there.options
        if name not in SELECTED and wanted.get(name, value) != value
    ]
    return InputError(
        f"inputs are not what was planned for {output}: "
        + ", ".join(differences.changed)
        + (f" and {more:,} more" if more else "")
        + (f"; options differ: {'; '.join(differing)}" if differing else "")
        + "; nothing was added",
        next_step="put the planned files back or leave the changed ones out, or choose another --output; "
        "rows of the old and the new content are never mixed",
        code="input_changed",
    )


def vanished(differences: Differences) -> tuple[str, ...]:
    """The warning for inputs that were asked for again and are gone; () where there are none."""
    if not differences.vanished_count:
        return ()
    more = differences.vanished_count - len(differences.vanished)
    named = ", ".join(differences.vanished) + (f" and {more:,} more" if more else "")
    return (f"not there any more: {named}; rows that were made of it stay, what is not done of it will fail",)
