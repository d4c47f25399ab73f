"""The documents say what the code does: verbs, options, codes, settings, events, links, and the examples."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from embq.app.cli.entry_point import cli
from embq.app.cli.verb_table import VERBS
from embq.app.export.targets import FOLDERS, TABLES
from embq.app.status.run_progress import RunProgress
from embq.core.errors import Exit
from embq.core.run.control import RunState
from embq.sources.kinds import _SUFFIXES
from tests.support.outputs.build import build, write_jsonl
from tests.support.words import ALLOWED, FUNCTIONS, findings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIRST = [
    ROOT / "README.md",
    ROOT / "docs" / "how-to" / "install.md",
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
]
"""Pages that a user reads first."""
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def nodes(package: str = "embq") -> Iterator[ast.AST]:
    """Every node of the syntax trees of a package, one file's tree at a time: all together are a gigabyte."""
    for path in sorted((ROOT / package).rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def page(name: str) -> str:
    """Text of a page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Text below a heading, up to the next one of its level or above."""
    level, _, _ = heading.partition(" ")
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no heading {heading!r}"
    return found[1]


def table(text: str) -> list[list[str]]:
    """The cells of every table row in `text`, without heads."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rules = [i for i, row in enumerate(rows) if all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    heads = {i - 1 for i in rules} | set(rules)
    return [row for i, row in enumerate(rows) if i not in heads]


def named(cells: list[str]) -> set[str]:
    """The names in backticks."""
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def fences(text: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


# --- verbs and options ---


def test_the_reference_has_no_row_of_a_verb_that_is_not_there() -> None:
    words = {row[0].strip("`").split()[1] for row in table(page("reference/cli"))}
    assert words == set(VERBS)


def test_every_extension_of_inputs_and_every_target_of_exports_has_its_row() -> None:
    assert set(_SUFFIXES) <= named([row[0] for row in table(page("reference/inputs"))])
    assert {*TABLES, *FOLDERS} <= named([row[0] for row in table(page("how-to/run/export"))])


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_every_verb_says_what_it_does(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    silent = {p.opts[-1] for p in command.params if isinstance(p, click.Option) and not p.help and not p.hidden}
    assert not silent


def test_every_experiment_and_its_options_stand_in_the_operations() -> None:
    bench = cli.get_command(click.Context(cli), "bench")
    assert isinstance(bench, click.Group)
    experiments, options = (table(part) for part in page("how-to/run/measure").split("With `--corpus-size N`"))
    assert named([row[0] for row in experiments]) == {f"embq bench {name}" for name in bench.commands}
    parameters = [p for command in bench.commands.values() for p in command.params if isinstance(p, click.Option)]
    assert named([row[0] for row in options]) == {p.opts[0] for p in parameters}
    assert all(p.help for p in parameters)


def commands_of(pages: list[Path]) -> list[str]:
    """The embq commands of pages, those in a container of the stack included."""
    blocks = [one.replace("\\\n", " ") for path in pages for one in fences(path.read_text(encoding="utf-8"), "sh")]
    found = [re.sub(r"^docker compose run --rm embq ", "embq ", line) for one in blocks for line in one.splitlines()]
    return [line for line in found if line.startswith("embq ")]


@pytest.mark.parametrize("line", sorted(set(commands_of(PAGES))))
def test_every_command_of_the_pages_is_understood(line: str) -> None:
    _, verb, *arguments = shlex.split(re.sub(r" 2> \S+", "", line).rstrip("& "), comments=True)
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None, f"there is no verb {verb}"
    command.make_context(verb, arguments)


@pytest.mark.parametrize("verb", VERBS)
def test_readme_and_tutorials_show_every_verb_at_work(verb: str) -> None:
    assert verb in {line.split()[1] for line in commands_of(FIRST)}


# --- links ---


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                target
            )


# --- settings, events, exit codes, status ---


def test_the_index_and_the_menu_of_the_site_list_every_page() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert {*re.findall(r"\(([\w/.-]+\.md)", index), "index.md"} == pages
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert set(re.findall(r"[\w/-]+\.md", menu)) == pages


def test_the_settings_are_those_of_the_code() -> None:
    source = (ROOT / "embq" / "core" / "settings.py").read_text(encoding="utf-8")
    told = {name for row in table(page("reference/settings")) for name in named(row[:1])}
    assert told == set(re.findall(r"EMBQ_[A-Z]+(?:_[A-Z]+)*", source))


def test_the_defaults_of_the_settings_are_those_of_the_code() -> None:
    from embq.core.settings import Settings

    told = {row[0].strip("`"): row[1] for row in table(page("reference/settings"))}
    settings = Settings()
    assert told["EMBQ_LEASE_S"] == f"{settings.lease_s:g}"
    assert told["EMBQ_BEAT_S"] == f"{settings.beat_s:g}"
    assert told["EMBQ_STALL_S"] == f"{settings.stall_s:g}"
    assert told["EMBQ_SLICE_S"] == f"{settings.slice_s:g}"


def events() -> Iterator[str]:
    """The first argument of every call that logs."""
    for node in nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        receiver, first = ast.unparse(node.func.value), node.args[0]
        logs = node.func.attr in ("info", "warning", "error", "bug") and re.search(r"(log|_events|logger)$", receiver)
        if logs and isinstance(first, ast.Constant):
            yield first.value


def test_the_events_are_those_of_the_code() -> None:
    told = {name for row in table(page("reference/events")) for name in named(row[:1])}
    # A row may come before the event that it tells of.
    assert set(events()) <= told


def test_the_names_of_the_exit_codes_are_those_of_the_code() -> None:
    told = {int(row[0]): row[1] for row in table(page("reference/exit-codes"))}
    assert told == {int(code): code.name for code in Exit}


def test_the_status_that_is_shown_has_the_shape_of_the_code() -> None:
    (shown,) = (json.loads(block) for block in fences(page("reference/status"), "json"))
    look = RunProgress(
        run="",
        output="",
        model="",
        state=RunState.ABSENT,
        priority=10,
        rows=0,
        rows_total=0,
        rows_total_exact=True,
        failures=0,
        units_total=0,
        done=0,
        received=0,
        in_flight=0,
        queued=0,
        quarantined=0,
        rows_per_s=0.0,
        embedding_per_s=0.0,
        eta_s=None,
        limit="",
        workers=[{}],
    ).to_json()
    assert list(shown) == list(look)
    assert list(shown["units"]) == list(look["units"])
    assert list(shown["workers"][0]) == list(look["workers"][0])
    units = shown["units"]
    assert sum(units.values()) == 2 * units["total"]


# --- failure codes ---


def parameters_called_code() -> dict[str, int]:
    """Function or class -> where its positional parameter `code` stands; -1 where it is given by name only."""
    found: dict[str, int] = {}
    for owner in nodes():
        for node in ast.iter_child_nodes(owner):
            if not isinstance(node, ast.FunctionDef):
                continue
            names = [argument.arg for argument in node.args.args]
            bound = names[:1] in (["self"], ["cls"])
            name = owner.name if isinstance(owner, ast.ClassDef) and node.name == "__init__" else node.name
            if "code" in names:
                found[name] = names.index("code") - bound
    return found


def texts(node: ast.AST) -> set[str]:
    """The texts among the constants of an expression."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value}


@cache
def codes() -> frozenset[str]:
    """Every failure code in the code, by where codes stand.

    Arguments called `code`, wherever a function or an error class takes one; their defaults; what is assigned to `code`
    or `default_code`; pairs of (code, message) as the value of `error=`, and of a return in `sources`; and what the
    scripts give to `lapse`.
    """
    positions = parameters_called_code()
    found: set[str] = set()
    for node in nodes():
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = positions.get(name, -1)
            if 0 <= at < len(node.args) and isinstance(node.args[at], ast.Constant):
                found |= texts(node.args[at])
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    found |= texts(keyword.value)
                if keyword.arg == "error" and isinstance(keyword.value, ast.Tuple):
                    found |= texts(keyword.value.elts[0])
        elif isinstance(node, ast.FunctionDef):
            named_so = [a.arg for a in node.args.args[len(node.args.args) - len(node.args.defaults) :]]
            for argument, default in zip(named_so, node.args.defaults, strict=True):
                if argument == "code":
                    found |= texts(default)
        elif isinstance(node, ast.Assign):
            found |= assigned_code(node.targets[0], node.value)
    for node in nodes("embq/sources"):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            found |= {code for code in texts(node.value.elts[0]) if isinstance(node.value.elts[1], ast.Constant)}
    for script in (ROOT / "embq" / "core" / "queue" / "lua").glob("*.py"):
        found |= set(re.findall(r"lapse\([^\n]*, '([a-z_]+)'", script.read_text(encoding="utf-8")))
    return frozenset(code for code in found if NAME.fullmatch(code))


def assigned_code(target: ast.expr, value: ast.expr) -> set[str]:
    """The text that an assignment gives to `code` or `default_code`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=True)
        return {code for one, given in pairs for code in assigned_code(one, given)}
    if getattr(target, "id", "") in ("code", "default_code") and isinstance(value, ast.Constant):
        return texts(value)
    return set()


def told_codes() -> set[str]:
    rows = table(page("reference/failure-codes"))
    return {name for row in rows for name in named(row[:1])}


def test_every_failure_code_of_the_code_is_told() -> None:
    assert codes() - told_codes() == set()


def test_every_failure_code_that_is_told_is_in_the_code() -> None:
    assert told_codes() - codes() == set()


# --- faults ---


def fault_ids() -> set[str]:
    """The ids of all tests that inject a fault."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests" / "faults").glob("test_*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "attr", "") == "fault"}


def promised_ids() -> set[str]:
    """The ids behind the promises."""
    return {id_ for row in table(page("reference/promises")) for id_ in re.findall(r"\b[A-Z]\d+\b", row[2])}


def test_every_promise_has_its_tests() -> None:
    assert promised_ids() - fault_ids() == set()


def test_every_fault_that_is_tested_stands_behind_a_promise() -> None:
    assert fault_ids() - promised_ids() == set()


def test_every_fault_that_a_document_names_is_tested() -> None:
    named = {
        id_
        for page in PAGES
        for id_ in re.findall(r"\b[WDSCRNTPVHI]\d\b", page.read_text(encoding="utf-8"))
        if page.name != "add-a-model.md"
    }
    assert named - fault_ids() == set()


def test_the_example_of_a_fault_is_a_fault_test() -> None:
    (snippet,) = fences(page("how-to/contribute/add-a-fault-test"), "python")
    names: dict[str, object] = {}
    exec(compile(snippet, "add-a-fault-test.md", "exec"), names)
    (mark,) = names["test_a_worker_is_killed_while_it_publishes"].pytestmark  # type: ignore[attr-defined]
    assert mark.args[0] in fault_ids()


# --- the tutorial's way to read a result ---


def test_the_readers_snippet_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"id": f"k{i}", "text": f"text {i}"} for i in range(7)]
    build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", lines)])
    monkeypatch.chdir(tmp_path)
    (snippet,) = fences(section(page("tutorial/texts"), "## Reading the result"), "python")
    names: dict[str, object] = {}
    exec(compile(snippet, "texts.md", "exec"), names)
    result, vectors = names["table"], names["vectors"]
    assert result.column_names == ["id", "ordinal", "key", "embedding", "caption", "metadata", "unit_id"]
    assert result["id"].to_pylist() == list(range(7))
    assert result["key"].to_pylist() == [f"k{i}" for i in range(7)]
    assert result["caption"].to_pylist() == [f"text {i}" for i in range(7)]
    assert vectors.shape == (7, 8)
    assert vectors[3].tolist() == result["embedding"][3].as_py()
    told = re.search(r"to_table\(\)  # (.+)", snippet)
    assert told is not None
    assert told[1].split(", ") == result.column_names


PLANTED = '''"""Rows of a table; None where there is none."""


def look(found: int) -> int:
    """See `rows`."""
    top, left = found, 1  # so many
    return sum(one for one in (top, left))
'''


def test_make_check_names_each_banned_word_with_its_line_and_rule() -> None:
    lines = [
        re.fullmatch(r"embq/planted\.py:(\d+): (.+) is on the list of (.+)", line)
        for line in findings("embq/planted.py", PLANTED)
    ]
    assert [(int(line[1]), line[2]) for line in lines if line] == [
        (1, '"None where"'),
        (4, "the name found"),
        (4, "the name look"),
        (6, '"so many"'),
        (7, "the name one"),
    ]
    style = section((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "## Style")
    assert {line[3] for line in lines if line} == {"CONTRIBUTING.md, Style 3 and 4"}
    assert [word for word in FUNCTIONS.split("|") if f"`{word}`" not in style] == []


def test_make_check_fails_at_a_banned_word_and_leaves_fields_of_formats_alone(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED, encoding="utf-8")
    check = [sys.executable, "-m", "tests.support.words"]
    assert subprocess.run([*check, tmp_path], cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 1
    assert "-m tests.support.words embq\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [where for where, name in ALLOWED if findings(where, f"{name} = 1\n")] == []
