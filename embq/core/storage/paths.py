"""Paths of outputs, on this machine or an object store, and the roots that outputs must be in."""

from __future__ import annotations

import io
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from embq.core.errors import ConfigError, EmbqError, InputError, UsageError
from embq.core.storage.beneath import require_regular
from embq.core.storage.object_clients import NEEDED
from embq.core.storage.objects import ObjectPath

SPELLINGS = {"s3a": "s3", "gcs": "gs"}
"""Aliases of schemes; the run's id depends on the canonical name."""


Place: TypeAlias = Path | ObjectPath
"""Path in an output, on this machine or an object store."""


def place(text: str | Place) -> Place:
    """The absolute path of an output.

    Raises UsageError for URLs of other storage, or with characters that a key cannot hold; and as `refuse_unnameable`
    does.
    """
    text = str(text)
    if not text:
        raise UsageError("the path of the output is empty", next_step="name a folder; . is the current one")
    refuse_unnameable(text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        if url := mistyped_url(text, {*NEEDED, *SPELLINGS}):
            raise UsageError(f"{text}: a URL has two slashes", next_step=f"write {url}, or ./{text} for a folder")
        if text == "~" or (text.startswith("~/") and not os.path.lexists("~")):
            why = "the shell leaves ~ as it is in quotes and behind ="
            raise UsageError(
                f"{text}: {why}", next_step=f"write $HOME{text[1:]}, or ./{text} for a folder of that name"
            )
        path = os.path.abspath(text)
        refuse_unnameable(path)  # by the current folder, too
        return Path(path)
    scheme = SPELLINGS.get(scheme.lower(), scheme.lower())
    rest = rest.rstrip("/")
    if "@" in rest.partition("/")[0]:
        raise UsageError(
            f"{scheme}:// with a user or a key in it is not taken: it would stand in logs",
            next_step="set the credentials up as for the store's own tools, for instance AWS_ACCESS_KEY_ID",
        )
    if scheme not in NEEDED:
        raise UsageError(
            f"{text}: nothing can be written there",
            next_step="name a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
        )
    parts = rest.split("/")
    if not all(parts) or {".", ".."} & set(parts) or set("?#*[]\\") & set(rest) or "::" in rest:
        raise UsageError(
            f"{text}: this is no bucket and prefix",
            next_step=f"name it as {scheme}://BUCKET/PREFIX, without any of ? # * [ ] and empty parts",
        )
    return ObjectPath(f"{scheme}://{rest}")


def refuse_unnameable(path: str) -> None:
    """Raise UsageError for a path that is not UTF-8, or has a zero byte.

    Arrow, HDF5 and faiss take paths in UTF-8 only.
    """
    why, next_step = "a name has no zero byte", "choose another folder"
    try:
        path.encode()
        os.fsencode(path)
        if "\0" not in path:
            return
    except UnicodeEncodeError:
        try:
            path.encode("utf-8", "surrogateescape").decode()
            why, next_step = "the locale of this process has no name for it", "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        except UnicodeError:
            why, next_step = "its name is not UTF-8", "rename it, or choose another folder"
    raise UsageError(f"{path!a} cannot be used: {why}", next_step=next_step)


def refuse_missing(path: Path) -> None:
    """Raise InputError if there is no folder at a path that a user gave as an output folder or an index."""
    if not os.path.isdir(path):
        raise InputError(
            f"{path} is not a folder" if os.path.lexists(path) else f"{path} does not exist",
            next_step=f"a URL has two slashes: {url}"
            if (url := mistyped_url(str(path).removeprefix(f"{os.getcwd()}/"), ("http", "https", *NEEDED, *SPELLINGS)))
            else "check the name; `embq run INPUT -o OUT` makes an output folder",
        )


def is_url(text: str) -> bool:
    """True if a user's text is a URL and no path of this machine."""
    return "://" in text


def is_in_bucket(text: str) -> bool:
    """True if a user's text is a URL of a store where outputs can lie."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in (*NEEDED, *SPELLINGS)


def mistyped_url(text: str, schemes: Container[str]) -> str:
    """The URL that was meant by a text with one slash behind a scheme, such as s3:/bucket/name; "" for other texts."""
    scheme, _, rest = text.partition(":/")
    return f"{scheme}://{rest}" if scheme.lower() in schemes and rest[:1] not in ("", "/") else ""


def is_folder(text: str) -> bool:
    """True if a user's text is a folder of this machine or a URL, and not the id of a run."""
    return is_url(text) or Path(text).is_dir()


def opened(path: Place) -> Path | io.BufferedReader:
    """The form in which libraries that read parts of a file take it: a path, or an open object.

    OSError for a path of anything but a regular file.
    """
    return require_regular(path) if isinstance(path, Path) else path.open()


@dataclass(frozen=True, slots=True)
class Outputs:
    """The folders and URLs that outputs must be in or below.

    Attributes:
        roots: as EMBQ_OUTPUTS has them; empty allows all.
    """

    roots: Sequence[str] = ()

    def __post_init__(self) -> None:
        for root in self.roots:
            try:
                place(root)
            except EmbqError as error:
                raise ConfigError(
                    f"EMBQ_OUTPUTS names {root}, where no output can lie: {error.message}", next_step=error.next_step
                ) from error

    def check(self, output: str) -> None:
        """InputError for an output elsewhere. Links are followed, so none leads out of the roots."""
        if self.roots and not any(is_inside(output, root) for root in self.roots):
            raise InputError(
                f"{output} is outside of where outputs may lie here ({', '.join(self.roots)})",
                next_step="choose another --output, or have its folder added to EMBQ_OUTPUTS of producer and writer",
                code="outside_outputs",
            )


ANYWHERE = Outputs()


def is_inside(output: str, root: str) -> bool:
    """True for a folder or URL that is another one or below it. Links are followed."""
    if is_url(output) or is_url(root):
        try:
            inner, above = place(output), place(root)
        except EmbqError:
            return False
        both = isinstance(inner, ObjectPath) and isinstance(above, ObjectPath)
        return both and f"{inner}/".startswith(f"{above}/")
    try:
        real, above_real = os.path.realpath(output), os.path.realpath(root)
    except (OSError, ValueError):  # a zero byte, or a loop of links
        return False
    return os.path.commonpath([real, above_real]) == above_real
