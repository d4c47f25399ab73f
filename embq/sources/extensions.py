"""File extensions of images and captions in shards and folders; `.json` is metadata."""

from __future__ import annotations

import os
from typing import NamedTuple

from embq.sources.decode import IMAGE_EXTENSIONS


class Extensions(NamedTuple):
    """Lower-case extensions without their first dot; the first that is there is taken.

    Attributes:
        images: of images.
        texts: of captions.
    """

    images: tuple[str, ...] = IMAGE_EXTENSIONS
    texts: tuple[str, ...] = ("txt",)

    @property
    def beside(self) -> tuple[str, ...]:
        """Extensions of the files beside an image in a folder, with the dot: captions in their order, then metadata."""
        return tuple(dict.fromkeys(ending for extension in (*self.texts, "json") for ending in endings(extension)))

    def is_image(self, name: str) -> bool:
        """True if the name ends in an image extension, in either case."""
        return name.lower().endswith(tuple(f".{extension}" for extension in self.images))

    def stem(self, name: str) -> str:
        """The name of an image without its extension, of which the longest counts that fits."""
        lower = name.lower()
        fitting = [len(extension) + 1 for extension in self.images if lower.endswith(f".{extension}")]
        return name[: -max(fitting)] if fitting else os.path.splitext(name)[0]


ALL = Extensions()


def endings(extension: str) -> tuple[str, ...]:
    """The forms in which an extension stands behind a name in a folder: `.txt`, `.TXT` and `.Txt`."""
    return tuple(dict.fromkeys(f".{form}" for form in (extension, extension.upper(), extension.capitalize())))


SYSTEM_NAMES = frozenset(
    (
        *("@eaDir", "#recycle", "__MACOSX", "lost+found", "System Volume Information"),
        *("$RECYCLE.BIN", "$Recycle.Bin", "Thumbs.db", "thumbs.db", "desktop.ini", "Desktop.ini", ".DS_Store"),
    )
)
"""Names of files and folders that systems and their file servers put among those of users: thumbnails, wastebaskets."""


def of_system(path: str) -> bool:
    """True if a file is a system's and nobody's sample: by `SYSTEM_NAMES`, or as macOS's `._name` of each file."""
    return path.rpartition("/")[2].startswith("._") or not SYSTEM_NAMES.isdisjoint(path.split("/"))


def extensions_of(options: tuple[tuple[str, str], ...]) -> Extensions:
    """The extensions in the options of a unit."""
    named = {name: tuple(value.split(";")) for name, value in options}
    return Extensions(named.get("image_keys", ALL.images), named.get("caption_keys", ALL.texts))
