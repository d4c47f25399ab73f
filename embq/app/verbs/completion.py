"""`embq completion`: shell completion."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, CompletionItem, get_completion_class

from embq.app.cli.sections import SectionedCommand

VARIABLE = "_EMBQ_COMPLETE"
"""Environment variable by which click's script asks for completions."""


class JoinedBash(BashComplete):
    """click's completion for bash, for words with ":" or "=" in them, such as `st:./model` and `--model=minilm`.

    bash splits words there and replaces only what follows (COMP_WORDBREAKS in its manual), so they are joined again.
    """

    _kept = ""
    """Beginning of the value that is completed, which bash leaves in place."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and that one."""
        before, last = super().get_completion_args()
        words = [""]
        is_open = False
        for word in (*before, last):
            is_break = bool(word) and not word.strip(":=")
            if is_break or (is_open and word):
                words[-1] += word
            else:
                words.append(word)
            is_open = is_break
        kept = words[-1] if is_open else words[-1].removesuffix(last)
        self._kept = kept.partition("=")[2] if kept.startswith("-") else kept
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """A completion as the function in bash reads it."""
        return f"{item.type},{item.value.removeprefix(self._kept)}"

    def source(self) -> str:
        """The script. No space follows a value that goes on."""
        goes_on = '[[ "${COMPREPLY[0]}" == *[:/] ]] && compopt -o nospace'
        return super().source().replace("    return 0", f"    {goes_on}\n\n    return 0")


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
