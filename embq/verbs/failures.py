"""`embq failures` and `embq retry`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from embq.cli.shared_options import broker_option, json_option, quiet_option, settings_with, worker_options

if TYPE_CHECKING:
    from core.storage.paths import Place
    from producer.retry import RetryResult


EXAMPLES = 3
"""Examples of each group."""


MENDS = {
    "bad_result": "use the same version of embq everywhere",
    "chunk_too_long": "larger --chunk-tokens, in a new run of these texts",
    "crash": "look at the log of the workers and at memory",
    "lost_result": "check the shared storage",
    "non_finite": "--dtype float32 holds larger values: a new run of these samples",
    "out_of_memory": "a device with more memory, or smaller --chunk-tokens in a new run",
    "outside_root": "put the files into the folder of the input",
    "source_denied": "give the worker the right to read them",
    "source_missing": "put them back",
    "source_unreadable": "check the disk or share",
    "storage_missing": "install what the message names",
    "too_many_chunks": "larger --chunk-tokens, in a new run of these texts",
    "unknown_kind": "update the workers",
    "wrong_count": "use the same version of embq everywhere",
    "wrong_model": "use the same model files everywhere",
    "wrong_schema": "use the same version of embq everywhere",
    "wrong_version": "use the same version of embq everywhere",
    "wrong_unit": "use the same version of embq everywhere",
}
"""Failure code -> what to do before a retry, where that is not fixing the samples themselves."""

FINAL = frozenset({"chunk_too_long", "non_finite", "too_many_chunks"})
"""Codes that a retry in the same run gives again."""


@dataclass(slots=True)
class Group:
    """The failures of one code; whole units apart from samples.

    Attributes:
        examples: (key, unit id, index of the unit in the manifest, message, attempt) of the first ones; the key of a
            whole unit is "".
    """

    code: str
    whole_unit: bool
    count: int = 0
    examples: list[tuple[str, str, int, str, int]] = field(default_factory=list)


@click.command("failures", epilog="Example: embq failures ./out")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@json_option
def failures(output: str, as_json: bool) -> int:
    """List the samples of OUT without an embedding, grouped by cause, most frequent first.

    Failures are listed once committed, and of a retried sample the last one. A unit that failed as a whole counts
    once.
    """
    from core.storage.paths import place

    root = place(output)
    groups = described(root, grouped(root))
    if as_json:
        click.echo(json.dumps({"schema": 1, "groups": groups}))
    else:
        _print_table(groups)
    return 0


def grouped(root: Place) -> list[Group]:
    """The committed failures by code, largest group first; raises as `standing_failures` does."""
    import pyarrow.compute as pc

    from core.run.standing_failures import standing_failures

    groups: dict[tuple[str, bool], Group] = {}
    for table in standing_failures(root):
        marked = table.append_column("whole", pc.is_null(table["ordinal"]))
        counts = marked.group_by(["code", "whole"]).aggregate([([], "count_all")])
        for row in counts.to_pylist():
            kind = (row["code"], row["whole"])
            group = groups.setdefault(kind, Group(*kind))
            group.count += row["count_all"]
            if len(group.examples) < EXAMPLES:
                same = pc.and_(pc.equal(marked["code"], row["code"]), pc.equal(marked["whole"], row["whole"]))
                first = marked.filter(same).slice(0, EXAMPLES - len(group.examples)).to_pylist()
                group.examples += [
                    (one["key"], one["unit_id"], one["u"], one["message"], one["attempt"]) for one in first
                ]
    return sorted(groups.values(), key=lambda group: (-group.count, group.code, group.whole_unit))


def described(root: Place, groups: list[Group]) -> list[dict[str, Any]]:
    """The groups as JSON-ready values, with the source of each example from the manifest."""
    from core.run.layout import Layout
    from core.run.manifest import Manifest

    manifest = Manifest(Layout(root)) if groups else None
    return [
        {
            "code": group.code,
            "count": group.count,
            "whole_unit": group.whole_unit,
            "examples": [
                {
                    "key": key,
                    "unit": unit_id,
                    "source": manifest.unit(u).source if manifest is not None else "",
                    "message": message,
                    "attempt": attempt,
                }
                for key, unit_id, u, message, attempt in group.examples
            ],
            "next": next_step(group.code, root),
        }
        for group in groups
    ]


def next_step(code: str, root: Place) -> str:
    """The advice to a user for failures of a code."""
    mend = MENDS.get(code, "mend them in their place")
    return mend if code in FINAL else f"{mend}, then: embq retry {root} --code {code}"


def _print_table(groups: list[dict[str, Any]]) -> None:
    """One line for each group and one for its first example."""
    from core.redaction import printable

    if not groups:
        click.echo("no failures")
        return
    width = max(len(group["code"]) for group in groups)
    for group in groups:
        what = ("unit" if group["whole_unit"] else "sample") + ("s" if group["count"] > 1 else "")
        example = group["examples"][0]
        at = example["source"] if group["whole_unit"] else f"{example['key']} in {example['source']}"
        click.echo(f"{group['count']:>12,} {what:<7}  {printable(group['code']):<{width}}  such as {printable(at)}")
        tries = f" (attempt {example['attempt']})" if example["attempt"] > 1 else ""
        click.echo(f"{'':>22}{printable(example['message'])}{tries}")
        click.echo(f"{'':>22}next: {printable(group['next'])}")


@click.command("retry", epilog="Examples: embq retry out | embq retry out --code truncated --dry-run")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@click.option("--code", "codes", multiple=True, metavar="CODE", help="Only failures with this code; repeatable.")
@click.option("--unit", "units", multiple=True, metavar="ID", help="Only failures of this unit; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print what would be retried, and do nothing.")
@worker_options
@broker_option
@json_option
@quiet_option
def retry(
    output: str,
    codes: tuple[str, ...],
    units: tuple[str, ...],
    dry_run: bool,
    broker: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Retry the failed samples of OUT, after the cause is fixed in the inputs.

    Nothing else is read or computed again. A new row replaces its failure; a sample that fails again has one more
    attempt. With --broker (or EMBQ_BROKER_URL) the work is handed to the resident services of that broker, and this
    command returns.
    """
    import embq
    from core.storage.paths import place
    from embq.local.session import print_summary, run_locally
    from producer.retry import FailureFilter, preview, retry

    root = place(output)
    chosen = FailureFilter(codes=codes, units=units)
    retried = preview(root, chosen) if dry_run else retry(root, chosen, version=embq.__version__)
    for line in notes(retried):
        click.echo(line, err=True)
    to_do = bool(retried.units or retried.under_way) and not dry_run
    url = settings_with(broker).broker_url
    if not to_do or url or _at_work(root):
        if to_do and url:
            _hand_over(retried, root, broker)
        elif to_do:
            click.echo(f"the process that is at work on {root} does them", err=True)
        if as_json:
            click.echo(json.dumps(to_json(retried)))
        return 0
    outcome = run_locally(retried.info, root, options, broker="", quiet=quiet or as_json)
    return print_summary(outcome, root, as_json=as_json)


def _at_work(root: Place) -> bool:
    """True if an `embq run` of this machine works on the output; its writer finds the added units."""
    from core.broker.embedded import kept_off
    from core.run.layout import Layout

    with kept_off(Layout(root).broker) as alone:
        return not alone


def _hand_over(retried: RetryResult, root: Place, broker: str) -> None:
    from embq.cli.authorization import authorized_client
    from producer.announce import hand_over

    hand_over(authorized_client(settings_with(broker), "retry"), retried.info, root)
    click.echo(f"run {retried.info.run}: handed to the workers", err=True)


def notes(retried: RetryResult) -> list[str]:
    """Lines on what is retried, by code, most frequent first, and what is left out."""
    from core.redaction import printable
    from producer.additions import FirstNames

    counts = [(count, printable(code), "sample") for code, count in retried.samples.items()]
    counts += [(count, printable(code), "whole unit") for code, count in retried.whole.items()]
    width = max((len(code) for _, code, _ in counts), default=0)
    lines = [f"{count:>12,}  {code:<{width}}  {_plural(count, what)}" for count, code, what in sorted(counts)[::-1]]
    if retried.failures:
        again = f"{retried.failures:,} {_plural(retried.failures, 'failure')}"
        lines.append(f"to do again: {again}, in {retried.units:,} {_plural(retried.units, 'unit')}")
    else:
        lines.append("nothing to retry" + (" that is not under way" if retried.under_way else ""))
    if retried.under_way:
        lines.append(f"under way already: {retried.under_way:,} {_plural(retried.under_way, 'failure')}")
    if retried.gone:
        lines.append(f"left out, not there any more: {printable(str(FirstNames(retried.gone)))}")
    if retried.chunks:
        lines.append(
            f"left out: {retried.chunks:,} {_plural(retried.chunks, 'failure')} of single chunks, whose texts have "
            "rows that stay; make a new run of these texts"
        )
    return lines


def _plural(count: int, what: str) -> str:
    return what if count == 1 else f"{what}s"


def to_json(retried: RetryResult) -> dict[str, Any]:
    """The shape that `embq retry --dry-run --json` promises."""
    return {
        "schema": 1,
        "run": retried.info.run,
        "failures": retried.failures,
        "units": retried.units,
        "samples": dict(sorted(retried.samples.items())),
        "whole_units": dict(sorted(retried.whole.items())),
        "under_way": retried.under_way,
        "chunks_left_out": retried.chunks,
        "gone": list(retried.gone),
    }
