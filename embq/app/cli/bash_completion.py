"""Completion for bash, of words with ":" or "=" in them."""

from __future__ import annotations

from click.shell_completion import BashComplete, CompletionItem


class JoinedBash(BashComplete):
    """click's completion for bash, for words with ":" or "=" in them, such as `st:./model` and `--model=minilm`.

    bash splits words there and replaces only what follows (COMP_WORDBREAKS in its manual), so they are joined again.
    """

    _prefix = ""
    """Beginning of the value that is completed, which bash leaves in place."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and that one."""
        preceding, last = super().get_completion_args()
        words = [""]
        is_open = False
        for word in (*preceding, last):
            is_break = bool(word) and not word.strip(":=")
            if is_break or (is_open and word):
                words[-1] += word
            else:
                words.append(word)
            is_open = is_break
        prefix = words[-1] if is_open else words[-1].removesuffix(last)
        self._prefix = prefix.partition("=")[2] if prefix.startswith("-") else prefix
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """A completion as the function in bash reads it."""
        return f"{item.type},{item.value.removeprefix(self._prefix)}"

    def source(self) -> str:
        """The script. No space follows a value that goes on."""
        goes_on = '[[ "${COMPREPLY[0]}" == *[:/] ]] && compopt -o nospace'
        return super().source().replace("    return 0", f"    {goes_on}\n\n    return 0")
