"""Filters: the rows that satisfy conditions are those that Python finds, and searches among them find the best."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import EmbqError, InputError, UsageError
from embq.core.filter.condition import OPS, Condition, read_condition
from embq.core.filter.evaluation import matches
from embq.index.change.compaction import compact
from embq.index.change.deletes import delete
from embq.index.collection.parts import NAMES
from embq.index.filter import selection
from embq.index.filter.columns import column_values
from embq.index.filter.selection import Selection, Selections
from embq.index.index_files.identity import BATCH_ROWS, Identity, write_identity
from embq.index.searcher import Searcher
from tests.indexer.indexes_that_grow import DIM, Quiet, add_part, copy_of, grown, make_index, rows, runner
from tests.indexer.indices_made import index_of

SIZES = (BATCH_ROWS + 37, 1_001, 4)
"""Rows of the identity files: the second and the third begin within a byte of the bitmap, and within a batch."""

LABELS = ("cat", "dog", "Cat", "", "köter 🐕", "猫", "a, b", None)
FLOATS = (0.0, -0.0, 1.5, -2.0, float("nan"), 1e300, None)
WHOLE = (0, 1, 2, -7, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), None)


def value_of(column: str, row: int) -> Any:
    """The value of each row follows from its id."""
    pick: dict[str, Callable[[int], Any]] = {
        "id": lambda i: i,
        "key": lambda i: f"k{i}",
        "caption": lambda i: None if i % 3 == 0 else f"a {LABELS[i % 8]} of number {i % 50}",
        "source": lambda i: None if i % 11 == 0 else f"s{i // 20_000}",
        "unit_id": lambda i: "u",
        "label": lambda i: LABELS[(i // 3) % len(LABELS)],
        "n": lambda i: WHOLE[i % len(WHOLE)],
        "score": lambda i: FLOATS[i % len(FLOATS)],
        "flag": lambda i: (True, False, None)[i % 3],
    }
    return pick[column](row)


TYPES = {
    "id": pa.int64(),
    "key": pa.string(),
    "caption": pa.string(),
    "source": NAMES,
    "unit_id": NAMES,
    "label": pa.string(),
    "n": pa.int64(),
    "score": pa.float64(),
    "flag": pa.bool_(),
}


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    folder, first, files = tmp_path_factory.mktemp("identity"), 0, []
    for number, count in enumerate(SIZES):
        columns = {}
        for name, type_ in TYPES.items():
            plain = pa.array(
                [value_of(name, row) for row in range(first, first + count)], getattr(type_, "value_type", type_)
            )
            columns[name] = plain.dictionary_encode() if type_ == NAMES else plain
        write_identity([pa.table(columns)], folder / f"{number}.arrow")
        files.append((folder / f"{number}.arrow", first, count))
        first += count
    return Identity.open(files)


DELETED = np.packbits(np.arange(8 * -(-sum(SIZES) // 8)) % 5 == 2, bitorder="little")

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "contains": lambda value, text: text in value,
    "in": lambda value, values: value in values,
}


def expected(conditions: list[Condition]) -> list[int]:
    """The rows that Python finds; null and NaN satisfy nothing."""

    def holds(row: int, one: Condition) -> bool:
        value = value_of(one.column, row)
        return value is not None and value == value and COMPARE[one.op](value, one.value)

    return [row for row in range(sum(SIZES)) if row % 5 != 2 and all(holds(row, one) for one in conditions)]


def ids_of(chosen: Selection) -> list[int]:
    found = np.flatnonzero(np.unpackbits(chosen.bits, bitorder="little"))
    assert len(found) == chosen.count
    assert (chosen.ids is None) == (chosen.count > selection.FEW)
    assert chosen.ids is None or chosen.ids.tolist() == found.tolist()
    ids: list[int] = found.tolist()
    return ids


ORDER = ("=", "!=", "<", "<=", ">", ">=")
CASES = [
    *[("n", op, value) for op in ORDER for value in (1, 1.5, 2**53 + 1, -(2**63), 1e300, -1e300, 2.0**63)],
    *[("score", op, value) for op in ORDER for value in (0.0, -0.0, 1.5, 2)],
    *[("label", op, value) for op in ORDER for value in ("cat", "", "köter 🐕", "none")],
    *[("flag", op, value) for op in ("=", "!=") for value in (True, False)],
    *[("source", op, "s1") for op in ("=", "!=", "<", ">=")],
    *[("label", "contains", text) for text in ("at", "", "🐕", "%")],
    ("caption", "contains", "猫 of"),
    ("source", "contains", "s"),
    ("key", "=", "k65573"),
    ("n", "in", (1, 2.0, 2.5, 2**63 - 1)),
    ("score", "in", (0.0, 1e300)),
    ("label", "in", ("dog", "a, b", "nothing")),
    ("flag", "in", (True, False)),
    ("source", "in", ("s0", "s3")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rows_that_satisfy_a_condition_are_those_that_python_finds(
    case: tuple[str, str, Any], identity: Identity
) -> None:
    condition = Condition(*case)
    assert ids_of(Selections(identity, sum(SIZES), DELETED).of([condition])) == expected([condition])


def test_all_conditions_hold_and_the_selection_is_kept_within_its_bytes(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    selections = Selections(identity, sum(SIZES), DELETED)
    three = [Condition("n", ">=", 1), Condition("label", "in", ("dog", "猫")), Condition("flag", "=", True)]
    first = selections.of(three)
    assert ids_of(first) == expected(three)
    assert selections.of(three[::-1]) is first
    monkeypatch.setattr(selection, "MOST_BYTES", 2 * first.bits.nbytes)
    for value in range(3):
        selections.of([Condition("n", "=", value)])
    assert selections.of(three) is not first


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        (("colour", "=", "red"), "no_column", "key, caption, source, label, n, score, flag"),
        (("unit_id", "=", "u"), "no_column", "it has key"),
        (("n", "=", "many"), "bad_filter", "holds numbers"),
        (("n", "=", "٣"), "bad_filter", "holds numbers"),
        (("score", "<", "1e400"), "bad_filter", "holds numbers"),
        (("score", "<", "9" * 400), "bad_filter", "out of range"),
        (("n", "=", True), "bad_filter", "holds numbers"),
        (("label", "=", 3), "bad_filter", "holds text"),
        (("label", "in", ("a", 3)), "bad_filter", "holds text"),
        (("flag", "=", 1), "bad_filter", "true and false"),
        (("flag", "<", True), "bad_filter", "= or !="),
        (("n", "contains", "1"), "bad_filter", "only texts"),
        (("label", "contains", 1), "bad_filter", "not a text"),
        (("label", "in", "cat"), "bad_filter", "list of values"),
        (("label", "=", ("cat",)), "bad_filter", "one value"),
    ],
)
def test_a_condition_that_does_not_fit_the_columns_is_refused_with_its_reason(
    case: tuple[str, str, Any], code: str, said: str, identity: Identity
) -> None:
    with pytest.raises(InputError) as refused:
        Selections(identity, sum(SIZES), None).of([Condition(*case)])
    assert refused.value.code == code
    assert said in f"{refused.value.message} {refused.value.next_step}"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("year >= 2020", ("year", ">=", "2020")),
        ("year>=2020", ("year", ">=", "2020")),
        ("year == 2020", ("year", "=", "2020")),
        (" label = a cat ", ("label", "=", "a cat")),
        ('label = " a cat "', ("label", "=", " a cat ")),
        ('label = ""', ("label", "=", "")),
        ("label = 'it''s'", ("label", "=", "it's")),
        ("label = ''", ("label", "=", "")),
        ("label = 'a", ("label", "=", "'a")),
        ("label in 'a', \"b\"", ("label", "in", ("a", "b"))),
        *((f"label = {quote}a and b = c{quote}", ("label", "=", "a and b = c")) for quote in "\"'"),
        *(
            (f"caption contains {text}", ("caption", "contains", text))
            for text in ("salt and pepper or not", "cat and dog in a park", "a box that is red or contains one")
        ),
        ("caption contains a = b", ("caption", "contains", "a = b")),
        ("contains contains in", ("contains", "contains", "in")),
        *((f"`a {op} b = c` {op} 1", ("a {op} b = c".replace("{op}", op), op, "1")) for op in OPS if op != "in"),
        ("`n in m` in [1]", ("n in m", "in", (1,))),
        ("`label`=cat", ("label", "=", "cat")),
        ("`label = cat", ("`label", "=", "cat")),
        ("my column != x", ("my column", "!=", "x")),
        ("label in cat, dog", ("label", "in", ("cat", "dog"))),
        ('label in ["a, b", "c"]', ("label", "in", ("a, b", "c"))),
        *((f"label in {given}", ("label", "in", ("a", "b"))) for given in ("(a, b)", "('a','b')", '("a", "b")')),
        ("label in 'a, b' , c", ("label", "in", ("a, b", "c"))),
        ("label in it's, b", ("label", "in", ("it's", "b"))),
        ("n in [1, 2.5]", ("n", "in", (1, 2.5))),
    ],
)
def test_a_condition_is_read_from_text(text: str, form: tuple[str, str, Any]) -> None:
    condition = Condition.parse(text)
    assert condition == Condition(*form)
    assert read_condition(condition.describe()) == condition


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("word", "said"), [("and", "--where once for each"), ("or", "in VALUE, VALUE")])
@pytest.mark.parametrize("upper", [True, False])
def test_several_conditions_in_one_text_are_told_apart(word: str, said: str, op: str, upper: bool) -> None:
    if op in ("contains", "in") and not upper:
        return  # words of a text
    word = word.upper() if upper else word
    for value in ("cat", "'a cat'", '"a cat"'):
        for column in ("year", "`my column`"):
            with pytest.raises(UsageError, match="several conditions") as refused:
                Condition.parse(f"label = {value} {word} {column} {op} 3")
            assert said in refused.value.next_step


def test_values_of_a_condition_may_be_those_of_numpy() -> None:
    assert read_condition(("year", ">=", np.int64(20))) == Condition("year", ">=", 20)
    for values in ([np.int64(20), np.float64(2.5)], np.array([20, 2.5])):
        assert read_condition(("year", "in", values)) == Condition("year", "in", (20, 2.5))


@pytest.mark.parametrize(
    "given",
    [
        "year",
        "year >=",
        "= 3",
        "label in",
        "label in a,,b",
        "label in [1",
        "label in ()",
        "label in [cat, dog]",
        'label = "a" or "b"',
        'label = "\\x"',
        "x" * 100_001,
        "a = " + "x" * 1_001,
        "label in " + ",".join("a" * 257),
        ("year", ">="),
        ("year", "~", 3),
        ("year", "=", None),
        ("year", "=", float("nan")),
        ("year", "=", 2**63),
        ("year", "in", []),
        7,
        None,
    ],
    ids=lambda given: str(given)[:20],
)
def test_what_is_no_condition_is_refused(given: object) -> None:
    with pytest.raises(EmbqError) as refused:
        read_condition(given)
    assert isinstance(refused.value, UsageError) or refused.value.code == "bad_filter"
    assert len(refused.value.message) < 500


def test_a_damaged_column_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "0.arrow"
    texts = [f"unmistakable {row:05d}" for row in range(1_000)]
    plain = {"id": pa.array(range(1_000)), "key": texts, "caption": texts}
    write_identity([pa.table(plain)], path)
    data = path.read_bytes()
    offsets = np.arange(1_001, dtype="<i4") * len(texts[0])
    assert data.count(offsets.tobytes()) == 2
    path.write_bytes(data.replace(offsets[500:].tobytes(), (offsets[500:] + 2**30).astype("<i4").tobytes()))
    damaged = Identity.open([(path, 0, 1_000)])
    with pytest.raises(InputError) as refused:
        Selections(damaged, 1_000, None).of([Condition("caption", "contains", "x")])
    assert refused.value.code == "index_damaged"
    with pytest.raises(InputError):
        column_values(damaged, None)


# --- columns to choose from ---


def test_a_long_text_that_many_rows_share_is_compared_once() -> None:
    """A dictionary longer than its batch was decoded: 500 rows of a text of 1 MB took 500 MB."""
    texts = pa.array(["x" * 1_000_000, *(f"source {n}" for n in range(1_000))])
    codes = pa.array([None, 7, *[0] * 498], pa.int32())
    column = pa.DictionaryArray.from_arrays(codes, texts)
    before, most = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    for op, value, count in (("=", "source 6", 1), ("!=", "source 6", 498), ("=", "nothing", 0)):
        found = matches(column, Condition("source", op, value))
        assert (len(found), found.null_count, pc.sum(found).as_py()) == (500, 0, count)
    assert pa.default_memory_pool().max_memory() <= max(most, before + 100_000_000)


def test_columns_are_listed_with_the_values_of_those_that_have_few(identity: Identity) -> None:
    found = {one.name: one for one in column_values(identity, DELETED)}
    assert list(found) == ["key", "caption", "source", "label", "n", "score", "flag"]
    assert [one.type for one in found.values()] == ["string", "string", "string", "string", "int64", "float64", "bool"]
    assert found["key"].values is None
    alive = [row for row in range(sum(SIZES)) if row % 5 != 2]
    for name in ("source", "label", "n", "flag"):
        values = [value_of(name, row) for row in alive]
        wanted = {one: values.count(one) for one in set(values) if one is not None}
        assert found[name].values == tuple(sorted(wanted.items(), key=lambda one: (-one[1], one[0])))
        assert found[name].rows == len(alive)


# --- searches ---


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of several blocks that has grown and has deleted rows, so several identity files and a bitmap."""
    index = copy_of(make_index(tmp_path_factory.mktemp("first")), tmp_path_factory.mktemp("grown"))
    add_part(index.parent / "data", "q", rows(133, 60))
    grown(index)
    delete(index, [f"p1.npy:{row}" for row in range(50)] + ["q.npy:7"])
    return index


def best(searcher: Searcher, queries: np.ndarray, keep: Callable[[str], bool], k: int) -> list[list[int]]:
    """The k nearest rows that are kept, by all vectors."""
    every = searcher.rows(np.arange(searcher.version.next_id))
    there = [i for i, key in enumerate(every["key"].to_pylist()) if keep(key)]
    scores = queries @ searcher.vectors(np.array(there)).T
    return [[there[place] for place in np.argsort(-row, kind="stable")[:k]] for row in scores]


def alive(key: str) -> bool:
    return not (key.startswith("p1.npy:") and int(key[7:]) < 50) and key != "q.npy:7"


@pytest.mark.parametrize("memory", ["ram", "mmap"])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_search_among_some_rows_finds_the_best_of_them(
    memory: str, compacted: bool, built: Path, tmp_path: Path
) -> None:
    index = built
    if compacted:
        index = copy_of(built, tmp_path)
        compact(index, runner(), Quiet())
    searcher = Searcher.open(index, memory=memory)
    queries = rows(10, 99).astype(np.float32)
    for condition, keep in (
        (Condition("key", "contains", "9"), lambda key: "9" in key),
        (Condition("key", "contains", "q.npy:1"), lambda key: "q.npy:1" in key),
        (Condition("source", "!=", "p1.npy"), lambda key: not key.startswith("p1.")),
        (Condition("source", "=", "p1.npy"), lambda key: key.startswith("p1.")),
    ):
        chosen = searcher.select([condition])
        wanted = best(searcher, queries, lambda key, keep=keep: alive(key) and keep(key), 10)  # type: ignore[misc]
        assert searcher.search(queries, 10, among=chosen).ids.tolist() == wanted
        by_lists = searcher.search(queries, 10, among=dataclasses.replace(chosen, ids=None), k_factor=8).ids
        assert np.mean([np.isin(one, ids).mean() for one, ids in zip(wanted, by_lists, strict=True)]) >= 0.95
    searcher.close()


def test_more_results_than_match_are_all_that_match_and_no_match_is_no_result(built: Path) -> None:
    searcher = Searcher.open(built)
    query = rows(1, 99).astype(np.float32)
    chosen = searcher.select([Condition("key", "contains", "q.npy:7")])
    for among in (chosen, dataclasses.replace(chosen, ids=None)):
        found = searcher.search(query, 200, among=among).ids[0]
        assert sorted(found[found >= 0].tolist()) == [1_200 + row for row in range(70, 80)]
    nothing = searcher.select([Condition("key", "=", "nothing")])
    assert (searcher.search(query, 5, among=nothing).ids == -1).all()
    every = searcher.search(query, 2_000, fill=True).ids[0]
    assert (every >= 0).sum() == searcher.n


def test_rows_without_direction_are_not_found_by_a_filter(tmp_path: Path) -> None:
    vectors = rows(300, 5)
    vectors[3], vectors[30] = 0, np.inf
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", vectors)
    command = [
        "index",
        tmp_path / "in",
        "--output",
        tmp_path / "index",
        "--refine",
        "fp16",
        "--drop-invalid",
        "--quiet",
    ]
    assert run([str(one) for one in command]) == 0
    searcher = Searcher.open(tmp_path / "index")
    chosen = searcher.select([Condition("key", "contains", ":3")])
    found = searcher.search(np.eye(1, DIM, dtype=np.float32), 50, among=chosen)
    assert sorted(found.ids[0][found.ids[0] >= 0].tolist()) == [31, 32, *range(33, 40)]


@pytest.mark.parametrize("key", ["IVF128,SQ8", "IVF128,PQ12x4"])
def test_one_row_in_a_hundred_is_found_with_the_recall_of_all_rows(key: str, tmp_path: Path) -> None:
    """Rows of a cluster share a file, so a condition on the file selects far lists for most queries."""
    random = np.random.default_rng(4)
    centres = random.standard_normal((100, 24)).astype(np.float32)
    (tmp_path / "in").mkdir()
    for number, centre in enumerate(centres):
        some = centre + 0.6 * random.standard_normal((200, 24)).astype(np.float32)
        np.save(tmp_path / "in" / f"c{number:02d}.npy", some / np.linalg.norm(some, axis=1, keepdims=True))
    searcher = Searcher.open(index_of(tmp_path / "in", to=tmp_path / "index", index_key=key, refine="fp16"))
    queries = centres + 0.6 * random.standard_normal((100, 24)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    for condition, keep in (
        (Condition("key", "contains", "77"), lambda name: "77" in name),
        (Condition("source", "=", "c07.npy"), lambda name: name.startswith("c07.")),
        (Condition("source", "<", "c30.npy"), lambda name: name < "c30"),
    ):
        chosen = searcher.select([condition])
        wanted = best(searcher, queries, keep, 10)
        for among in (chosen, dataclasses.replace(chosen, ids=None)):
            found = np.concatenate([searcher.search(query[None], 10, among=among).ids for query in queries])
            recall = np.mean([np.isin(one, ids).mean() for one, ids in zip(wanted, found, strict=True)])
            assert recall >= 0.95, (condition, among.ids is None)
