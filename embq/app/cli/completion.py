"""`embq completion`: a script for shells. It runs at each start of a shell, so it imports no other verb's options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from embq.app.cli.sections import SectionedCommand

VARIABLE = "_EMBQ_COMPLETE"
"""Environment variable by which click's script asks for completions."""


@click.command(
    "completion",
    cls=SectionedCommand,
    epilog='Examples: eval "$(embq completion bash)" | embq completion fish > ~/.config/fish/completions/embq.fish',
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a script that completes verbs, options, models and files in SHELL.

    Add `eval "$(embq completion bash)"` to ~/.bashrc, `eval "$(embq completion zsh)"` to ~/.zshrc, or write the script
    of fish to the file in the example.
    """
    from embq.app.cli.entry_point import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "embq", VARIABLE).source())
