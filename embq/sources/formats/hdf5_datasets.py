"""Chooses the datasets of an HDF5 file that hold the texts, and the ids beside them.

Datasets whose paths differ in numbers only are read as one, in order of the numbers.
"""

from __future__ import annotations

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


def choose(found: Sequence[Dataset], unit: Unit) -> tuple[list[Dataset], str]:
    """The datasets of texts in order, and the name of the ids beside them, "" where there are none.

    Raises SourceError `missing_column`, `ambiguous_column` or `wrong_column_type`.
    """
    named = dict(unit.options)
    families: dict[str, list[Dataset]] = {}
    unread = [one for one in found if one.role in ("outside", "unread")]
    found = [one for one in found if one.role != "unread"]
    for one in found:
        if one.role in ("text", "outside"):
            families.setdefault(one.family, []).append(one)
    wanted = named.get("text_column", "").strip("/")
    chosen = (
        _wanted(found, families, wanted, unit) if wanted else _only(found, families, named.get("id_column", ""), unit)
    )
    if [one.path for one in chosen] != [wanted] or chosen[0].role != "text":
        _refuse_unread(unread, chosen, unit)
        _refuse_gaps(found, chosen, unit)
    return chosen, _ids(found, chosen, named.get("id_column", ""), unit)


def _refuse_unread(unread: Sequence[Dataset], chosen: Sequence[Dataset], unit: Unit) -> None:
    """Raise SourceError where something that is not read is a chosen dataset, belongs to them or leads to one."""
    families = {f"{one.family}/" for one in chosen}
    for one in unread:
        if any(family.startswith(f"{one.family}/") for family in families):
            raise SourceError(
                f"{unit.source}: {one.path} is not read: it is {one.type}",
                code="missing_column",
                next_step="write its strings into the file itself, as a dataset with one dimension, or leave it out",
            )


def _refuse_gaps(found: Sequence[Dataset], chosen: Sequence[Dataset], unit: Unit) -> None:
    """Raise SourceError where one of several batches has other datasets and not the chosen one: texts would be lost."""
    batches = {one.family.rpartition("/")[0] for one in chosen if one.family != one.path}
    there = {one.path.rpartition("/")[0] for one in chosen}
    for one in found:
        group = one.path.rpartition("/")[0]
        if one.family.rpartition("/")[0] in batches and group not in there:
            beside = [other for other in found if other.path.rpartition("/")[0] == group]
            raise SourceError(
                f"{unit.source}: {group} has no {_last(chosen[0].path)!r}, which others beside it have; "
                f"it has {_shown(beside)}",
                code="missing_column",
                next_step="write the file with the same datasets in each batch, or leave it out",
            )


def _wanted(found: Sequence[Dataset], families: dict[str, list[Dataset]], wanted: str, unit: Unit) -> list[Dataset]:
    if exact := [one for one in found if one.path == wanted and one.role == "text"]:
        return exact
    fitting = [name for name in families if name == wanted or name.endswith(f"/{wanted}")]
    if not fitting:
        raise SourceError(
            f"{unit.source}: no dataset of strings {wanted!r}; it has {_shown(found)}",
            code="missing_column",
            next_step="name one with --text-column, such as batches/*/text, or leave the file out",
        )
    if len(fitting) > 1:
        raise _ambiguous(unit, families, fitting)
    return families[fitting[0]]


def _only(found: Sequence[Dataset], families: dict[str, list[Dataset]], ids: str, unit: Unit) -> list[Dataset]:
    free = [name for name in families if _last(name) not in (*ID_COLUMNS, ids)]
    if len({one.family for one in found}) == 1:
        free = list(families)  # as of a table with one column
    if not free:
        raise SourceError(
            f"{unit.source}: no dataset of strings with one dimension; it has {_shown(found)}",
            code="missing_column",
            next_step="write the texts as a dataset of strings, or leave the file out",
        )
    if len(free) > 1:
        for known in TEXT_COLUMNS:
            by_name = [name for name in free if _last(name) in (known, f"{known}s")]
            if len(by_name) == 1:
                return families[by_name[0]]
            if by_name:
                break
        raise _ambiguous(unit, families, free)
    return families[free[0]]


def _ids(found: Sequence[Dataset], chosen: Sequence[Dataset], wanted: str, unit: Unit) -> str:
    """The name of the ids that stand beside every chosen dataset, with as many rows."""
    there = {one.path: one for one in found if one.role in ("text", "integer")}
    names = [wanted] if wanted else [form for name in ID_COLUMNS for form in (name, f"{name}s")]
    for name in names:
        beside = [there.get(beside_of(one.path, name)) for one in chosen]
        if all(
            ids is not None and ids.path != one.path and ids.rows == one.rows
            for ids, one in zip(beside, chosen, strict=True)
        ):
            return name
    if wanted:
        raise SourceError(
            f"{unit.source}: no ids {wanted!r} with as many rows beside {_shown(chosen)}; it has {_shown(found)}",
            code="missing_column",
            next_step="check --id-column, or leave it away to have rows counted",
        )
    others = {(one.path, one.rows): one for one in found if one.role not in ("text", "integer")}
    for name in names:
        for one in chosen:
            if ids := others.get((beside_of(one.path, name), one.rows)):
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


def _shown(found: Sequence[Dataset]) -> str:
    """Paths by family with types, for a message."""
    families: dict[str, str] = {}
    for one in found:
        families.setdefault(one.family, one.type)
    listed = [f"{name} ({kind})" for name, kind in families.items()]
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "") if listed else "none"


def _ambiguous(unit: Unit, families: dict[str, list[Dataset]], names: Sequence[str]) -> SourceError:
    candidates = [families[name][0] for name in names]
    return SourceError(
        f"{unit.source}: more than one dataset may hold the texts: {_shown(candidates)}",
        code="ambiguous_column",
        next_step=f"say which: --text-column '{names[0]}'",
    )
