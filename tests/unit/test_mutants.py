"""The tool that measures how many small mutants the tests notice."""

from __future__ import annotations

import ast
import importlib.util
import os
import queue
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.mutants import __main__ as tool
from tests.mutants.executed import Executed
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.nearness import Nearness
from tests.mutants.plugin import functions_below, swap
from tests.support import durations

LINES = [
    ("return a < b", "comparison", "return (a <= b)"),
    ("return a == b", "comparison", "return (a != b)"),
    ("return a is b", "comparison", "return (a is not b)"),
    ("return 0 < a in b", "comparison", "return (0 < a not in b)"),
    ("if a: return b", "negated condition", "if not (a): return b"),
    ("return [c for c in a if c]", "negated condition", "return [c for c in a if (not (c))]"),
    ("return a and (b or 2)", "and/or", "return (a or (b or 2))"),
    ("return a + 2", "off by one", "return a + 3"),
    ("return a + 2", "off by one", "return a + 1"),
    ("return a * 0.5", "constant", "return a * 1.0"),
    ("return f(a, key=True)", "constant", "return f(a, key=False)"),
    ("return a['é']", "constant", "return a['']"),
    ("return a[f'{b}:key']", "constant", 'return a[""]'),
    ("a.b = c", "statement removed", "pass"),
    ("while a: break", "statement removed", "while a: pass"),
    ("raise ValueError", "raise removed", "pass"),
    ("return a", "wrong variable", "return b"),
    ("return a", "return None", "return None"),
]


def mutants_of(body: str) -> list[Mutant]:
    return [*mutants("m.py", f"def f(a, b):\n    {body}\n    g(a)\n".encode())]


@pytest.mark.parametrize(("line", "kind", "mutated"), LINES)
def test_a_line_has_mutants_of_each_kind(line: str, kind: str, mutated: str) -> None:
    source = f"def f(a, b):\n    {line}\n    g(a)\n".encode()
    (mutant,) = [it for it in mutants_of(line) if (it.line, it.kind, it.mutated) == (2, kind, mutated)]
    assert mutant.original == line
    assert mutant.functions == (("f", 1),)
    assert mutant.applied(source).decode() == f"def f(a, b):\n    {mutated}\n    g(a)\n"


def test_each_mutant_is_another_program_in_one_place() -> None:
    source = Path(tool.__file__).read_bytes()
    programs = [it.applied(source) for it in mutants("m.py", source)]
    assert len(programs) > 200
    assert ast.dump(ast.parse(source)) not in {ast.dump(ast.parse(it)) for it in programs}


def test_an_except_clause_may_swallow() -> None:
    source = b"def f():\n    try:\n        g()\n    except OSError:\n        a()\n        b()\n    return 1\n"
    (mutant,) = [it for it in mutants("m.py", source) if it.kind == "except swallows"]
    assert (
        mutant.applied(source) == b"def f():\n    try:\n        g()\n    except OSError:\n        pass\n    return 1\n"
    )


def test_texts_for_people_and_code_outside_of_functions_are_left_alone() -> None:
    source = '''
"""A module."""
LIMIT = 5
if TYPE_CHECKING:
    import x
@decorated(1, "a")
def f(a: Literal["b"] = 3) -> Literal["c"]:
    """A function."""
    log.warning("event", why="text")
    self._log.info("event", number=1)
    b: "int"
'''
    assert [*mutants("m.py", source.encode())] == []
    raising = [*mutants("m.py", b'def f(a):\n    raise KeyError(f"no {a}", "b" + c, next_step="do")\n')]
    assert [it.kind for it in raising] == ["raise removed"]
    made = [*mutants("m.py", b'def f(a):\n    return g(a, next_step="do") or InputError("text", code="x")\n')]
    assert not [it for it in made if it.kind == "constant"]


MODULE = """
from contextlib import contextmanager
from functools import cache, wraps

def twice(f):
    @wraps(f)
    def inner(a):
        return f(a) * 2
    return inner

@twice
@cache
def decorated(a):
    return a + 10

def around(a):
    def nested(b):
        return a + b + 10
    return nested(1)

def generator(a):
    yield a + 10

@contextmanager
def managed(a):
    yield a + 10

class Base:
    def method(self):
        return 10

class Class(Base):
    def method(self):
        number = 10 + super().method()
        return number

    @classmethod
    def of_class(cls):
        return 10

    @staticmethod
    def static():
        return 10

    @property
    def value(self):
        return 10
"""


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    (tmp_path / "mutable.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("mutable", tmp_path / "mutable.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def values(module: Any) -> list[int]:
    with module.managed(1) as managed:
        nested, generated = module.around(1), next(module.generator(1))
        instance = module.Class()
        methods = [instance.method(), instance.of_class(), instance.static(), instance.value]
        return [module.decorated(len(sys.modules)) - 2 * len(sys.modules), nested, generated, managed, *methods]


def test_functions_of_every_sort_get_the_code_of_a_mutant(module: ModuleType) -> None:
    path = Path(str(module.__file__))
    functions = functions_below(path.parent)
    before = values(module)
    changed = []
    for mutant in mutants(str(path), MODULE.encode()):
        if mutant.kind != "off by one" or mutant.text != "11":
            continue
        assert swap(functions, path, mutant.applied(MODULE.encode()), mutant.functions) == 1
        module.decorated.__wrapped__.cache_clear()
        changed.append([now - then for now, then in zip(values(module), before, strict=True)])
        swap(functions, path, MODULE.encode(), mutant.functions)
    places = [[int(at == place) for at in range(8)] for place in range(8)]
    base = [0, 0, 0, 0, 1, 0, 0, 0]  # of the method of the base class
    expected = [[2 * it for it in places[0]], *places[1:4], base, *places[4:]]
    assert changed == expected


def test_wrappers_that_exist_and_methods_without_their_super_get_the_code_too(module: ModuleType) -> None:
    path = Path(str(module.__file__))
    functions = functions_below(path.parent)
    made = [it for it in mutants(str(path), MODULE.encode()) if it.original == "return f(a) * 2" and it.text == "3"]
    assert swap(functions, path, made[0].applied(MODULE.encode()), made[0].functions) == 2
    assert module.decorated(1) == 33
    removed = [
        it for it in mutants(str(path), MODULE.encode()) if it.original.startswith("number =") and it.text == "pass"
    ]
    assert swap(functions, path, removed[0].applied(MODULE.encode()), removed[0].functions) == 1
    with pytest.raises(NameError):
        module.Class().method()


def test_the_nearest_tests_import_the_module_then_share_rare_words_with_its_place(tmp_path: Path) -> None:
    files = {
        "embq/core/a.py": "def f():\n    common()\n    return 'no_such_index'\n",
        "tests/test_imports.py": "from embq.core.a import f",
        "tests/test_replaces.py": 'common()\nNAME = "embq.core.a.f"',
        "tests/test_says_it.py": 'common()\nassert code == "no_such_index"',
        "tests/test_common.py": "from embq.core import b\ncommon()",
        "tests/test_other.py": "import os",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    nearest = [path.stem for path in Nearness(tmp_path).nearest("embq/core/a.py", 3)]
    assert {*nearest[:2]} == {"test_imports", "test_replaces"}
    assert nearest[2:] == ["test_says_it", "test_common", "test_other"]


def test_a_seed_draws_the_same_mutants_of_each_room() -> None:
    first, again = (tool.drawn(["claim", "stages"], 5, random.Random(3)) for _ in range(2))
    assert first == again
    assert sorted(Counter(room for room, _ in first).values()) == [2, 3]


def test_listed_equivalent_mutants_are_of_lines_that_exist() -> None:
    for line in tool.EQUIVALENT.read_text().splitlines():
        path = tool.ROOT / line.partition(" | ")[0]
        if not line.startswith("#"):
            listed = [
                it for it in mutants(str(path.relative_to(tool.ROOT)), path.read_bytes()) if tool.is_equivalent(it)
            ]
            assert listed, line


PROJECT = {
    "pyproject.toml": '[tool.coverage.run]\nsource = ["embq"]\npatch = ["subprocess"]\nparallel = true\n',
    "embq/__init__.py": "",
    "embq/core.py": "def f(a):\n    b = a + 1\n    c = b < 2\n    return b\n",
    "tests/__init__.py": "",
    "tests/contract/test_core_fails.py": """
from embq.core import f

def test_that_fails_in_any_case():
    assert f(1) == 30
""",
    "tests/unit/test_core.py": """
import subprocess, sys
from embq.core import f

def test_by_a_process():
    program = "from embq.core import f; print(f(20))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "21\\n"

def test_in_this_process():
    assert f(1) == 2
""",
    "tests/unit/test_other.py": """
def test_something_else():
    assert True
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with the tool in its tests."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copytree(Path(tool.__file__).parent, tmp_path / "tests/mutants")
    (tmp_path / "tests/support").mkdir()
    shutil.copy2(Path(durations.__file__), tmp_path / "tests/support")
    return tmp_path


def test_the_tests_that_execute_a_line_are_known_those_with_processes_too(project: Path) -> None:
    options = ["-p", "tests.mutants.executed", "--cov", "--cov-context=test", "--cov-report="]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))},
        "COVERAGE_FILE": str(project / "executed"),
        "PYTHONPATH": str(project),
    }
    command = [sys.executable, "-m", "pytest", "-q", *options, "tests/unit"]
    subprocess.run(command, cwd=project, env=environment, check=True, stdout=subprocess.DEVNULL)
    executed = Executed(project, project / "executed")
    names = {f"tests/unit/test_core.py::{name}" for name in ("test_by_a_process", "test_in_this_process")}
    assert [executed.tests("embq/core.py", line) for line in (2, 4)] == [names, names]
    assert executed.tests("embq/other.py", 1) == set()
    assert Executed(project, None).tests("embq/core.py", 2) == set()


def test_mutants_of_a_project_are_killed_here_and_in_processes_or_survive(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    monkeypatch.setattr(tool, "ROOT", project)
    waiting: queue.SimpleQueue[tuple[str, Mutant]] = queue.SimpleQueue()
    source = (project / "embq/core.py").read_bytes()
    for mutant in mutants("embq/core.py", source):
        if mutant.kind in {"off by one", "return None"}:
            waiting.put(("core", mutant))
    answers = list(tool.judged(0, waiting, 20))
    verdicts = [(it["mutated"], it["verdict"], it.get("by", "").rpartition("::")[2]) for it in answers]
    assert verdicts == [
        ("b = a + 2", "killed", "test_by_a_process"),
        ("b = a + 0", "killed", "test_by_a_process"),
        ("c = b < 3", "survived", ""),
        ("c = b < 1", "survived", ""),
        ("return None", "killed", "test_by_a_process"),
    ]
    assert (project / "embq/core.py").read_bytes() == source
    assert {it.get("quick", True) for it in answers} == {True}
    assert answers[0]["flaky"] == ["tests/contract/test_core_fails.py::test_that_fails_in_any_case"]
