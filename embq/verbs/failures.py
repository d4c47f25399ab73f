"""`embq failures`: what has no embedding, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from embq.options import json_option

if TYPE_CHECKING:
    from core.objects import Place

EXAMPLES = 3
"""Examples kept of each group: enough to see what they have in common."""


@dataclass(slots=True)
class Group:
    """The failures of one code; whole units apart from samples.

    Attributes:
        examples: (key, unit id, index of the unit in the manifest, message) of the first ones; the key of a whole
            unit is "".
    """

    code: str
    whole_unit: bool
    count: int = 0
    examples: list[tuple[str, str, int, str]] = field(default_factory=list)


@click.command("failures", epilog="Example: embq failures ./out")
@click.argument("output", metavar="OUT", type=click.Path(file_okay=False))
@json_option
def command(output: str, as_json: bool) -> int:
    """List what has no embedding in OUT, grouped by cause, most frequent first.

    Only committed failures are listed. A unit that failed as a whole counts once, whatever it holds.
    """
    from core.objects import place

    root = place(output)
    groups = described(root, grouped(root))
    if as_json:
        import json

        click.echo(json.dumps({"schema": 1, "groups": groups}))
    else:
        _print_table(groups)
    return 0


def grouped(root: Place) -> list[Group]:
    """The committed failures by code, largest group first; raises what `core.reader.failure_tables` does."""
    import pyarrow.compute as pc

    from core.reader import failure_tables

    groups: dict[tuple[str, bool], Group] = {}
    for table in failure_tables(root):
        marked = table.append_column("whole", pc.is_null(table["ordinal"]))
        counts = marked.group_by(["code", "whole"]).aggregate([([], "count_all")])
        for row in counts.to_pylist():
            kind = (row["code"], row["whole"])
            group = groups.setdefault(kind, Group(*kind))
            group.count += row["count_all"]
            if len(group.examples) < EXAMPLES:
                same = pc.and_(pc.equal(marked["code"], row["code"]), pc.equal(marked["whole"], row["whole"]))
                first = marked.filter(same).slice(0, EXAMPLES - len(group.examples)).to_pylist()
                group.examples += [(one["key"], one["unit_id"], one["u"], one["message"]) for one in first]
    return sorted(groups.values(), key=lambda group: (-group.count, group.code, group.whole_unit))


def described(root: Place, groups: list[Group]) -> list[dict[str, Any]]:
    """The groups as JSON-ready values, with the source of each example from the manifest."""
    from core.layout import Layout
    from core.manifest import Manifest

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
                }
                for key, unit_id, u, message in group.examples
            ],
        }
        for group in groups
    ]


def _print_table(groups: list[dict[str, Any]]) -> None:
    """One line for each group and one for its first example."""
    from embq.verification.findings import printable

    if not groups:
        click.echo("no failures")
        return
    width = max(len(group["code"]) for group in groups)
    for group in groups:
        what = ("unit" if group["whole_unit"] else "sample") + ("s" if group["count"] > 1 else "")
        example = group["examples"][0]
        at = example["source"] if group["whole_unit"] else f"{example['key']} in {example['source']}"
        click.echo(f"{group['count']:>12,} {what:<7}  {printable(group['code']):<{width}}  such as {printable(at)}")
        click.echo(f"{'':>22}{printable(example['message'])}")
