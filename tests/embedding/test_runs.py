"""`embq.run` and `embq.enqueue`: the verbs of the command line, started by a program."""

from __future__ import annotations

from contextlib import ExitStack
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import numpy as np
import pytest

import embq
from embq.app.cli.arguments import arguments_of
from embq.app.cli.entry_point import cli
from embq.app.embedding.options import AddOptions, EnqueueOptions, IndexOptions, RunOptions
from embq.core.arguments import PARAMETERS, python_words
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import EmbqError, InputError, ModelError, UsageError
from embq.core.run.reader import row_tables
from tests.e2e.services import Services
from tests.support.outputs.build import write_jsonl
from tests.support.waiting import wait_until


def texts(path: Path, count: int) -> Path:
    return write_jsonl(path, [{"id": str(n), "text": f"text {n}"} for n in range(count)])


def option_params(verb: str) -> list[click.Option]:
    command: click.Command | None = cli
    for word in verb.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


def rows(root: Path) -> int:
    return sum(table.num_rows for table in row_tables(root, ["id"]))


def test_a_run_is_watched_stopped_gone_on_with_and_done(tmp_path: Path, short_tmp: Path) -> None:
    source, out = texts(tmp_path / "t.jsonl", 300), short_tmp / "out"
    options = {"model": "stub:4?ms_per_sample=20", "unit_size": 10, "devices": "cpu"}
    with embq.run(source, out, **options) as job:
        wait_until(lambda: (now := job.progress()) is not None and now.share_embedded > 0)
        with pytest.raises(TimeoutError):
            job.wait(0.1)
    with pytest.raises(EmbqError) as raised:
        job.wait()
    assert raised.value.code == "stopped"
    done = embq.run([str(source)], str(out), **options).wait(60)
    assert (done.state, done.rows, done.failures) == ("done", 300, 0)
    assert rows(out) == 300


def test_errors_of_a_run_are_raised(tmp_path: Path) -> None:
    source = texts(tmp_path / "t.jsonl", 3)
    with pytest.raises(InputError, match="not found"):
        embq.run(tmp_path / "absent.jsonl", tmp_path / "out", model="stub:4").wait(60)
    with pytest.raises(ModelError):
        embq.run(source, tmp_path / "out", model="nonsense:4").wait(60)
    with pytest.raises(UsageError, match="no option dtypes"):
        embq.run(source, tmp_path / "out", model="stub:4", dtypes="int8")
    with pytest.raises(UsageError, match="float8"):
        embq.run(source, tmp_path / "out", model="stub:4", dtype="float8").wait(60)


def test_options_are_those_of_the_command_line() -> None:
    given = {"model": ["a=stub:4", "b=stub:8"], "normalize": False, "similarity": True, "add": False, "limit": None}
    assert arguments_of("run", given) == ["--model=a=stub:4", "--model=b=stub:8", "--no-normalize", "--similarity"]
    assert arguments_of("run", {"metadata_columns": ["a", "b"]}) == ["--metadata-columns=a,b"]
    numbers = {"chunk_tokens": np.int64(256), "normalize": np.False_, "similarity": np.True_}
    assert arguments_of("run", numbers) == ["--chunk-tokens=256", "--no-normalize", "--similarity"]
    assert arguments_of("run", {"metadata_columns": np.array(["a", "b"])}) == ["--metadata-columns=a,b"]


@pytest.mark.parametrize("call", [embq.run, embq.enqueue])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inputs": None}, "inputs is None"),
        ({"inputs": ["t.jsonl", 5]}, r"inputs\[1\] is 5"),
        ({"inputs": {"a", "b"}}, "inputs is a set"),
        ({"output": 5}, "output is 5"),
        ({"model": object()}, "model is of type object"),
        ({"limit": object()}, "limit is of type object"),
    ],
)
def test_arguments_of_another_type_start_nothing(call: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call(**{"inputs": "t.jsonl", "output": "out", "model": "stub:8", **given})


TYPED = (RunOptions, EnqueueOptions, IndexOptions)


def test_errors_name_parameters_and_not_options() -> None:
    searched = {param.name for param in option_params("search")} & {*signature(embq.search).parameters}
    typed = {name for options in TYPED for name in get_type_hints(options)} | searched | {"model", "output", "recall"}
    assert typed - {"k"} <= PARAMETERS
    for name in typed:
        option = f"--{name.replace('_', '-')}"
        assert python_words(f"leave out {option} and more", {}) == f"leave out {name}= and more"
        assert python_words(f"Invalid value for '{option}': x", {}) == f"Invalid value for {name}=: x"
        assert python_words(f"run `embq run x {option} 3`", {}) == f"run `embq run x {option} 3`"
    assert python_words("--devices cpu, or --chunk-tokens 8 or less", {"devices": "device"}) == (
        'device="cpu", or chunk_tokens=8 or less'
    )
    assert python_words("leave out --no-normalize, --no-header or --gpus", {}) == (
        "leave out normalize=False, no_header= or --gpus"
    )
    assert python_words("give --broker redis://HOST:6379", {}) == 'give broker="redis://HOST:6379"'


NOT_TYPED = {"model", "output", "json", "quiet", "verbose", "no_color", "dry_run", "recall"}
"""Arguments of their own, and what is of a terminal."""


@pytest.mark.parametrize(
    ("verb", "typed"),
    [
        ("run", RunOptions),
        ("enqueue", EnqueueOptions),
        ("index build", IndexOptions),
        ("index add", AddOptions),
    ],
)
def test_the_options_of_a_program_are_typed(verb: str, typed: type) -> None:
    options = option_params(verb)
    names = {one.opts[0].lstrip("-").replace("-", "_") for one in options}
    assert {*get_type_hints(typed)} == names - NOT_TYPED
    choices = {one.name: {*one.type.choices} for one in options if isinstance(one.type, click.Choice)}
    hints = {name: {*get_args(get_args(hint)[0])} for name, hint in get_type_hints(typed).items() if name in choices}
    assert hints == choices


@pytest.mark.slow
def test_a_run_of_a_broker_is_watched_and_cancelled(
    own_server: EmbeddedServer, tmp_path: Path, short_tmp: Path
) -> None:
    with ExitStack() as stack:
        Services(stack, own_server, workers=1)
        source = texts(tmp_path / "t.jsonl", 60)
        options = {"broker": own_server.url, "unit_size": 5}
        job = embq.enqueue(source, short_tmp / "one", model="stub:4", **options)
        assert job.wait(60).rows == 60
        slow = embq.enqueue(source, short_tmp / "two", model="stub:4?ms_per_sample=200", **options)
        wait_until(lambda: slow.progress() is not None)
        slow.cancel()
        assert slow.wait(60).state == "cancelled"
        with pytest.raises(InputError):
            embq.enqueue(tmp_path / "absent", short_tmp / "three", model="stub:4", **options)


def test_no_room_of_the_package_hides_a_function_of_it() -> None:
    """An imported `embq.enqueue` would take the place of the function `embq.enqueue`."""
    rooms = {path.parent.name for path in Path(embq.__file__).parent.glob("*/__init__.py")}
    assert not rooms & set(embq.__all__)
