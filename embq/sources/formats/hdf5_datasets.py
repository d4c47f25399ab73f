"""Chooses the datasets of an HDF5 file that hold the texts, and the ids beside them.

Datasets whose paths differ in numbers only are read as one, in order of the numbers.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from embq.core.errors import SourceError
from embq.core.units import Unit
from embq.sources.columns import ID_COLUMNS, TEXT_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One dataset.

    Attributes:
        path: from the root of the file, without a slash in front.
        rows: its length.
        role: "text", "integer" or "other"; "outside" for texts that lie in another file, "unread" for what else is not
            read: links, and datasets of several dimensions or none.
        type: for messages.
    """

    path: str
    rows: int
    role: str
    type: str

    @property
    def family(self) -> str:
        """The path with "*" for each number: what its siblings in other batches have in common."""
        return "/".join("*" if part.isdecimal() else part for part in self.path.split("/"))

    @property
    def order(self) -> tuple[tuple[int, str], ...]:
        """Sorts numbers as numbers: 2 before 10."""
        return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in self.path.split("/"))


def choose(datasets: Sequence[Dataset], unit: Unit) -> tuple[list[Dataset], str]:
    """The datasets of texts in order, and the name of the ids beside them, "" if there are none.

    Raises SourceError `missing_column`, `ambiguous_column` or `wrong_column_type`.
    """
    named = dict(unit.options)
    families: dict[str, list[Dataset]] = {}
    unread = [entry for entry in datasets if entry.role in ("outside", "unread")]
    datasets = [entry for entry in datasets if entry.role != "unread"]
    for dataset in datasets:
        if dataset.role in ("text", "outside"):
            families.setdefault(dataset.family, []).append(dataset)
    path = named.get("text_column", "").strip("/")
    chosen = (
        _named(datasets, families, path, unit) if path else _only(datasets, families, named.get("id_column", ""), unit)
    )
    if [entry.path for entry in chosen] != [path] or chosen[0].role != "text":
        _refuse_unread(unread, chosen, unit)
        _refuse_gaps(datasets, chosen, unit)
    return chosen, _ids(datasets, chosen, named.get("id_column", ""), unit)


def _refuse_unread(unread: Sequence[Dataset], chosen: Sequence[Dataset], unit: Unit) -> None:
    """Raise SourceError if something that is not read is a chosen dataset, belongs to them or leads to one."""
    families = {f"{entry.family}/" for entry in chosen}
    for dataset in unread:
        if any(family.startswith(f"{dataset.family}/") for family in families):
            raise SourceError(
                f"{unit.source}: {dataset.path} is not read: it is {dataset.type}",
                code="missing_column",
                next_step="write its strings into the file itself, as a dataset with one dimension, or leave it out",
            )


def _refuse_gaps(datasets: Sequence[Dataset], chosen: Sequence[Dataset], unit: Unit) -> None:
    """Raise SourceError if one of several batches has other datasets and not the chosen one: texts would be lost."""
    batches = {entry.family.rpartition("/")[0] for entry in chosen if entry.family != entry.path}
    groups = {entry.path.rpartition("/")[0] for entry in chosen}
    for dataset in datasets:
        group = dataset.path.rpartition("/")[0]
        if dataset.family.rpartition("/")[0] in batches and group not in groups:
            beside = [other for other in datasets if other.path.rpartition("/")[0] == group]
            raise SourceError(
                f"{unit.source}: {group} has no {_last(chosen[0].path)!r}, which others beside it have; "
                f"it has {_shown(beside)}",
                code="missing_column",
                next_step="write the file with the same datasets in each batch, or leave it out",
            )


def _named(datasets: Sequence[Dataset], families: dict[str, list[Dataset]], path: str, unit: Unit) -> list[Dataset]:
    if exact := [dataset for dataset in datasets if dataset.path == path and dataset.role == "text"]:
        return exact
    fitting = [name for name in families if name == path or name.endswith(f"/{path}")]
    if not fitting:
        raise SourceError(
            f"{unit.source}: no dataset of strings {path!r}; it has {_shown(datasets)}",
            code="missing_column",
            next_step="name one with --text-column, such as batches/*/text, or leave the file out",
        )
    if len(fitting) > 1:
        raise _ambiguous(unit, families, fitting)
    return families[fitting[0]]


def _only(datasets: Sequence[Dataset], families: dict[str, list[Dataset]], ids: str, unit: Unit) -> list[Dataset]:
    free = [name for name in families if _last(name) not in (*ID_COLUMNS, ids)]
    if len({dataset.family for dataset in datasets}) == 1:
        free = list(families)  # as of a table with one column
    if not free:
        raise SourceError(
            f"{unit.source}: no dataset of strings with one dimension; it has {_shown(datasets)}",
            code="missing_column",
            next_step="write the texts as a dataset of strings, or leave the file out",
        )
    if len(free) > 1:
        for text_name in TEXT_COLUMNS:
            by_name = [name for name in free if _last(name) in (text_name, f"{text_name}s")]
            if len(by_name) == 1:
                return families[by_name[0]]
            if by_name:
                break
        raise _ambiguous(unit, families, free)
    return families[free[0]]


def _ids(datasets: Sequence[Dataset], chosen: Sequence[Dataset], id_name: str, unit: Unit) -> str:
    """The name of the ids that stand beside every chosen dataset, with as many rows."""
    by_path = {entry.path: entry for entry in datasets if entry.role in ("text", "integer")}
    paths = [entry.path.rpartition("/") for entry in datasets]
    written = {name.lower(): name for group, _, name in paths if group == chosen[0].path.rpartition("/")[0]}
    forms = [form for name in ID_COLUMNS for form in (name, f"{name}s")]
    names = [id_name] if id_name else [name for form in forms for name in (form, written.get(form, form))]
    for name in names:
        beside = [by_path.get(beside_of(entry.path, name)) for entry in chosen]
        if all(
            ids is not None and ids.path != entry.path and ids.rows == entry.rows
            for ids, entry in zip(beside, chosen, strict=True)
        ):
            return name
    if id_name:
        raise SourceError(
            f"{unit.source}: no ids {id_name!r} with as many rows beside {_shown(chosen)}; it has {_shown(datasets)}",
            code="missing_column",
            next_step="check --id-column, or leave it away to have rows counted",
        )
    unusable = {(entry.path, entry.rows): entry for entry in datasets if entry.role not in ("text", "integer")}
    for name in names:
        for dataset in chosen:
            if ids := unusable.get((beside_of(dataset.path, name), dataset.rows)):
                raise SourceError(
                    f"{unit.source}: no keys can be made of {_shown([ids])}",
                    code="wrong_column_type",
                    next_step="write them as strings or integers, name others with --id-column, or rename them to have "
                    "the rows counted",
                )
    return ""


def beside_of(path: str, name: str) -> str:
    """The path of a dataset in the same group."""
    folder = path.rpartition("/")[0]
    return f"{folder}/{name}" if folder else name


def _last(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _shown(datasets: Sequence[Dataset]) -> str:
    """Paths by family with types, for a message."""
    families: dict[str, str] = {}
    for dataset in datasets:
        families.setdefault(dataset.family, dataset.type)
    listed = [f"{name} ({kind})" for name, kind in families.items()]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "") if listed else "none"


def _ambiguous(unit: Unit, families: dict[str, list[Dataset]], names: Sequence[str]) -> SourceError:
    candidates = [families[name][0] for name in names]
    return SourceError(
        f"{unit.source}: more than one dataset may hold the texts: {_shown(candidates)}",
        code="ambiguous_column",
        next_step=f"say which: --text-column {shlex.quote(names[0])}",
    )
