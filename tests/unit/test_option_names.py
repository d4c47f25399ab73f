"""Options of all verbs: one name for one thing, the same help text wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from embq.app.cli.entry_point import cli
from embq.app.cli.lazy_group import CommandWithVerbs
from embq.app.cli.sections import SECTIONS, SectionedCommand

ALIASES = {"--num-prepro-workers", "--output-folder", "--output-hdfs-folder", "--output-partition-count"}
"""Names of clip-retrieval and autofaiss, beside embq's own."""


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
        if isinstance(command, CommandWithVerbs):
            for further in command.later:
                below = command.get_command(None, further)
                assert below is not None
                yield f"{path}{name} {further}", below


COMMANDS = dict(verbs(cli))


def own_options(name: str) -> list[click.Option]:
    """The options of a verb that its help shows."""
    return [one for one in COMMANDS[name].params if isinstance(one, click.Option) and not one.hidden]


@pytest.mark.parametrize("verb", COMMANDS)
def test_an_output_has_one_name_and_a_model_one(verb: str) -> None:
    for option in own_options(verb):
        names = {*option.opts, *option.secondary_opts} - ALIASES
        assert not names & {"--out", "--output-dir", "--arch"}
        assert "--to" not in names or verb == "export"  # where it is the kind of the target
        if names & {"-o", "--output"}:
            assert {"-o", "--output"} == names
        if names & {"-m", "--model", "--clip-model"}:
            assert {"-m", "--model"} <= names


@pytest.mark.parametrize("verb", COMMANDS)
def test_parallelism_is_workers_and_threads(verb: str) -> None:
    names = {name for option in own_options(verb) for name in option.opts} - ALIASES
    parallel = {name for name in names if any(word in name for word in ("worker", "thread", "process", "job", "cores"))}
    assert parallel <= {"--workers", "--threads"}


@pytest.mark.parametrize("name", ["--json", "--quiet", "--verbose", "--vector-name", "--log", "--threads", "--devices"])
def test_an_option_that_many_verbs_have_is_the_same_in_each(name: str) -> None:
    told = {
        (tuple(sorted({*option.opts} - ALIASES)), option.help)
        for verb in COMMANDS.keys() - {"serve", "ui"}  # their threads are those of a search
        for option in own_options(verb)
        if name in option.opts
    }
    assert len(told) == 1, told


def test_a_broker_is_told_in_the_same_words_but_for_its_default() -> None:
    told = {
        (tuple(option.opts), (option.help or "").partition("  [")[0])
        for verb in COMMANDS
        for option in own_options(verb)
        if "--broker" in option.opts
    }
    assert told == {(("--broker",), "Broker: redis://, rediss:// or unix://, without a password.")}


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_option_stands_in_one_section_of_the_help(verb: str) -> None:
    assert isinstance(COMMANDS[verb], SectionedCommand)
    headings = [name for names in SECTIONS.values() for name in names]
    assert len(headings) == len(set(headings))
    assert {option.opts[0] for option in own_options(verb)} <= set(headings)
