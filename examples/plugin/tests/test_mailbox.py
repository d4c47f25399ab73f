"""The promises of a kind of input, for `mbox`."""

from pathlib import Path

import pytest

from embq.testing.sources import *  # noqa: F403
from embq.testing.sources import ROWS, Case


def write_mailbox(folder: Path) -> Path:
    """A mailbox with a mail per row."""
    path = folder / "mails.mbox"
    mails = [f"From me\nMessage-ID: {key}\nSubject: {text}\n\nmail {key}\n\n" for key, text in ROWS.items()]
    path.write_text("".join(mails))
    return path


def append_a_mail(path: Path) -> None:
    """Change the mailbox."""
    with path.open("a") as file:
        file.write("From me\n\none more\n")


@pytest.fixture
def case() -> Case:
    """The input that the tests are about."""
    listing = [(key, None, f"{text}\n\nmail {key}") for key, text in ROWS.items()]
    return Case(kind="mbox", write=write_mailbox, change=append_a_mail, listing=listing)
