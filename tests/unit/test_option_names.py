"""Options of all verbs: one name for one thing, the same help text wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from embq.app.cli.entry_point import cli, run
from embq.app.cli.sections import SAME_OPTIONS, Option, SectionedCommand
from embq.app.verbs.run import FIRST_OPTIONS
from embq.compat.fire import FireCommand


def verbs(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every verb and verb below it, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs(command, f"{path}{name} ")
            continue
        yield path + name, command


COMMANDS = {name: verb for name, verb in verbs(cli) if not isinstance(verb, FireCommand)}
"""Without those of other tools, whose names are theirs."""


@pytest.mark.parametrize("verb", COMMANDS)
def test_no_verb_has_options_that_its_help_does_not_show(verb: str) -> None:
    assert not [one.opts for one in COMMANDS[verb].params if isinstance(one, click.Option) and one.hidden]


def own_options(name: str) -> list[click.Option]:
    return [one for one in COMMANDS[name].params if isinstance(one, click.Option)]


@pytest.mark.parametrize("verb", COMMANDS)
def test_an_output_has_one_name_and_a_model_one(verb: str) -> None:
    for option in own_options(verb):
        names = {*option.opts, *option.secondary_opts}
        assert not names & {"--out", "--output-dir", "--arch"}
        assert "--to" not in names or verb == "export"  # where it is the kind of the target
        if names & {"-o", "--output"}:
            assert {"-o", "--output"} == names
        if names & {"-m", "--model"}:
            assert {"-m", "--model"} <= names


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("other", SAME_OPTIONS)
def test_an_earlier_name_of_an_option_is_that_option(verb: str, other: str) -> None:
    command, ours = COMMANDS[verb], SAME_OPTIONS[other]
    names = {name for option in own_options(verb) for name in option.opts}
    if ours not in names or other in names:
        return
    for value in (["cpu"], []):
        context = click.Context(command, resilient_parsing=True)
        written = [other, *value] if value else [f"{other}=cpu"]
        command.parse_args(context, written)
        name = next(option.name for option in own_options(verb) if ours in option.opts)
        assert context.params[str(name)] in ("cpu", ("cpu",))


def test_the_first_help_of_a_run_is_short_and_help_all_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "--help"]) == 0
    short = re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert set(short) == {*FIRST_OPTIONS, "--help", "--help-all"}
    assert run(["run", "--help-all"]) == 0
    whole = re.findall(r"^ +(?:-\w, )?(--[a-z-0-9]+)", capsys.readouterr().out, re.MULTILINE)
    assert {option.opts[0] for option in own_options("run")} <= {*whole}


@pytest.mark.parametrize("verb", COMMANDS)
def test_parallelism_is_workers_and_threads(verb: str) -> None:
    names = {name for option in own_options(verb) for name in option.opts}
    parallel = {name for name in names if any(word in name for word in ("worker", "thread", "process", "job", "cores"))}
    assert parallel <= {"--workers", "--threads"}


@pytest.mark.parametrize("name", ["--json", "--quiet", "--verbose", "--vector-name", "--log", "--threads", "--devices"])
def test_an_option_that_many_verbs_have_is_the_same_in_each(name: str) -> None:
    told = {
        (tuple(sorted(option.opts)), option.help)
        for verb in COMMANDS.keys() - {"serve", "ui"}  # their threads are those of a search
        for option in own_options(verb)
        if name in option.opts
    }
    assert len(told) == 1, told


OF_THE_VERB = ("--output", "--run", "--ids", "--threads", "--refine", "--no-refine")
"""Options whose help begins with what the verb does with the same thing."""


def test_an_option_that_several_verbs_have_means_one_thing() -> None:
    meanings: dict[str, set[str]] = {}
    for option in (one for verb in COMMANDS for one in own_options(verb)):
        for name in {*option.opts, *option.secondary_opts} - {*OF_THE_VERB}:
            if name.startswith("--"):
                meanings.setdefault(name, set()).add(
                    re.split(r"\W", (option.help or "").removeprefix("Random "))[0].lower()
                )
    assert not {name: said for name, said in meanings.items() if len(said) > 1}


@pytest.mark.parametrize(("name", "start"), [("--model", "Model"), ("--workers", "Worker processes ")])
def test_models_and_workers_are_those_of_one_table(name: str, start: str) -> None:
    texts = [option.help or "" for verb in COMMANDS for option in own_options(verb) if name in option.opts]
    assert len(texts) > 8
    assert all(text.startswith(start) for text in texts)


def test_a_broker_is_told_in_the_same_words_but_for_its_default() -> None:
    told = {
        (tuple(option.opts), (option.help or "").partition("  [")[0])
        for verb in COMMANDS
        for option in own_options(verb)
        if "--broker" in option.opts
    }
    assert told == {(("--broker",), "Broker: redis://, rediss:// or unix://, without a password.")}


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_has_sections_where_options_are_many(verb: str) -> None:
    command = COMMANDS[verb]
    assert isinstance(command, SectionedCommand)
    lines = command.get_help(click.Context(command, info_name=verb)).splitlines()
    headings = [line for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)]
    assert len(headings) == len(set(headings))
    assert headings[-1] == ("General:" if len(headings) > 1 else "Options:")
    assert len(headings) > 1 or len(own_options(verb)) <= 16


def test_the_help_shows_a_default_that_it_does_not_name_in_brackets() -> None:
    options = [one for verb in COMMANDS for one in own_options(verb) if isinstance(one, Option) and not one.is_flag]
    for one in options:
        given = isinstance(one.default, str | int | float) and one.default != ""
        assert bool(one.show_default) == (given and "  [" not in (one.help or "")), one.opts


PATHS = [
    (verb, param)
    for verb, command in COMMANDS.items()
    for param in command.params
    if isinstance(param.type, click.Path) and not (isinstance(param, click.Option) and param.is_flag)
]


@pytest.mark.parametrize(("verb", "param"), PATHS, ids=[f"{verb} {param.name}" for verb, param in PATHS])
def test_an_empty_path_is_not_the_current_folder(
    verb: str, param: click.Parameter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [p for p in COMMANDS[verb].params if isinstance(p, click.Argument) and isinstance(p.type, click.Path)]
    given = ["" if one is param else "nowhere" for one in arguments]
    if isinstance(param, click.Option):
        given += [param.opts[0], ""]
    with pytest.raises(click.UsageError) as refused:
        COMMANDS[verb].make_context(verb, given)
    if not isinstance(refused.value, click.MissingParameter):
        assert "it is empty" in refused.value.message or "'' does not exist" in refused.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--id", "--like", "--unlike"])
def test_a_key_is_not_an_id_and_can_be_searched(option: str) -> None:
    with pytest.raises(click.UsageError, match="--where 'key = a1'"):
        COMMANDS["search"].make_context("search", ["out", option, "a1"])
