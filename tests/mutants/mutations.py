"""The small mutants of a module, each of one place inside of a function.

Code outside of functions is left out: it runs once, when a module is imported, which a fork cannot repeat. Docstrings,
annotations, decorators, log calls and the texts of errors are left out, for no test should pin them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

PAIRS = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {**PAIRS, **{other: it for it, other in PAIRS.items()}}
REMOVED = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Assert, ast.Break, ast.Continue)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp)
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one place."""

    path: str
    line: int
    kind: str
    original: str  # the lines of the place, joined to one without indentation
    mutated: str
    start: int  # of the bytes of the module that `text` replaces
    end: int
    text: str
    functions: tuple[
        tuple[str, int], ...
    ]  # qualified name and first line of each around the place, the outermost first

    def applied(self, source: bytes) -> bytes:
        """The mutated module."""
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """The functions around a node, the prefix of names in it, and the line that binds each variable first."""

    functions: tuple[tuple[str, int], ...] = ()
    prefix: str = ""
    variables: dict[str, int]


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """Every mutant of a module; a few do not compile, for the tree does not tell where parentheses are refused."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node, around in _nodes(ast.parse(source), _Around(variables={})):
        for (line, column), (last, last_column), kind, text in _changes(node, around.variables):
            if not around.functions:
                continue
            start, end = starts[line - 1] + column, starts[last - 1] + last_column
            text = text.replace("{}", source[start:end].decode(), 1) if kind == "negated condition" else text
            head, tail = lines[line - 1][:column].decode(), lines[last - 1][last_column:].decode()
            original, mutated = (" ".join(f"{head}{it}{tail}".split()) for it in (source[start:end].decode(), text))
            yield Mutant(path, line, kind, original, mutated, start, end, text, around.functions)


def _nodes(node: ast.AST, around: _Around) -> Iterator[tuple[ast.AST, _Around]]:
    """Each node that may be changed."""
    yield node, around
    inside, children = around, _children(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from _nodes(default, around)
        name, line = f"{around.prefix}{node.name}", min(it.lineno for it in (node, *node.decorator_list))
        inside = _Around(
            functions=(*around.functions, (name, line)), prefix=f"{name}.<locals>.", variables=dict(_variables(node))
        )
    elif isinstance(node, ast.ClassDef):
        inside = replace(around, prefix=f"{around.prefix}{node.name}.")
    for child in children:
        yield from _nodes(child, inside)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """The parts of a node that may be changed."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            names = [ast.unparse(it) for it in node.decorator_list]
            return [] if any(it.endswith(("abstractmethod", "overload")) for it in names) else node.body
        case ast.ClassDef(body=body):
            return body
        case ast.Lambda(body=body):
            return [body]
        case ast.If(test=test, orelse=orelse) if "TYPE_CHECKING" in ast.unparse(test):
            return orelse
        case ast.AnnAssign(value=value):
            return [value] if value else []
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr():  # Python 3.11 does not say where parts of the latter are
            return []
        case ast.Raise(exc=ast.Call() as call):
            return _without_texts(call)
        case ast.Call() if _is_log_call(node):
            return []
        case ast.Call():
            name = ast.unparse(node.func).rpartition(".")[2]
            if name.endswith(("Error", "Exception", "Warning", "Exit")):
                return _without_texts(node)
            keywords = [it.value for it in node.keywords if it.arg != "next_step"]
            return [node.func, *(node.args[1:] if name in {"cast", "TypeVar"} else node.args), *keywords]
    return ast.iter_child_nodes(node)


def _without_texts(error: ast.Call) -> list[ast.expr]:
    values = (*error.args, *(keyword.value for keyword in error.keywords))
    return [it for it in values if not any(isinstance(part, ast.JoinedStr | ast.Constant) for part in ast.walk(it))]


def _is_log_call(node: ast.AST) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr in LEVELS and "log" in ast.unparse(function.value)


def _changes(node: ast.AST, variables: dict[str, int]) -> Iterator[tuple[Place, Place, str, str]]:
    """(start, end, kind, replacement) of each change of a node itself."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
            return
        case ast.Expr(value=value) if _is_log_call(value):
            return
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            return
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield *_span(test), "negated condition", "not ({})"
        case ast.comprehension(ifs=conditions):
            for test in conditions:
                yield *_span(test), "negated condition", "(not ({}))"
        case ast.Raise():
            yield *_span(node), "raise removed", "pass"
        case ast.ExceptHandler(body=[first, *_] as body) if not isinstance(first, ast.Pass):
            yield _span(first)[0], _span(body[-1])[1], "except swallows", "pass"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield *_span(value), "return None", "None"
        case ast.Compare():
            for at, operator in enumerate(node.ops):
                operators = [*node.ops[:at], SWAPPED[type(operator)](), *node.ops[at + 1 :]]
                other = ast.Compare(node.left, operators, node.comparators)
                yield *_span(node), "comparison", f"({ast.unparse(other)})"
        case ast.BoolOp():
            other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            yield *_span(node), "and/or", f"({ast.unparse(other)})"
        case ast.Constant(value=value):
            kind = "off by one" if type(value) is int else "constant"
            yield from ((*_span(node), kind, repr(other)) for other in _other_values(value))
        case ast.JoinedStr():
            yield *_span(node), "constant", '""'
        case ast.Name(ctx=ast.Load(), id=name) if name in variables:
            bound = sorted(it for it, line in variables.items() if line < node.lineno)
            if name in bound and len(bound) > 1:
                yield *_span(node), "wrong variable", bound[(bound.index(name) + 1) % len(bound)]
    if isinstance(node, REMOVED):
        yield *_span(node), "statement removed", "pass"


def _span(node: ast.AST) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _other_values(value: object) -> list[object]:
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1] if value else [1]
        case float():
            return [value * 2 or 1.0]
        case str():
            return ["", f"{value}x"] if value else ["x"]
        case bytes():
            return [b"", value + b"x"] if value else [b"x"]
    return []


def _variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int]]:
    """Each parameter, and each variable with the line that binds it first."""
    arguments = function.args
    for it in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if it and it.arg not in {"self", "cls"}:
            yield it.arg, 0
    lines: dict[str, int] = {}
    shared = {name for it in ast.walk(function) if isinstance(it, ast.Global | ast.Nonlocal) for name in it.names}
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in {"_", *shared}:
            lines[node.id] = min(node.lineno, lines.get(node.id, node.lineno))
        if not isinstance(node, (*SCOPES, ast.GeneratorExp)):
            waiting += ast.iter_child_nodes(node)
    yield from lines.items()
