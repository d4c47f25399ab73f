"""Under which names indices are served: what the command line gives becomes (name, modality, index folder)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import InputError, UsageError
from core.storage.paths import refuse_unnameable

MODALITIES = ("image", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An index folder with the name and the modality by which requests ask for it."""

    name: str
    modality: str
    path: Path


def named_indices(indices: Sequence[str], names: Sequence[str], modality_of: Callable[[Path], str]) -> list[Named]:
    """All that is to be served, in the order of the command line; those of `names` stand last.

    Args:
        indices: folders: of an index, or of a run with its indices. An index below a run has the run's name, so that
            its images and its texts are two modalities of one name, as in clip-retrieval.
        names: NAME=FOLDER.
        modality_of: what an index folder holds: "image" or "text".

    Raises:
        UsageError: a name is given twice, or is none.
        InputError: `no_index`.
    """
    given = [("", folder) for folder in indices]
    for pair in names:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise UsageError(f"--name {pair!r} is not NAME=INDEX", next_step="write --name photos=./out/index/image")
        given.append((name, folder))
    if not given:
        raise UsageError("there is no index to serve", next_step="embq serve OUT, with the output of a run")
    found: dict[tuple[str, str], Named] = {}
    for name, folder in given:
        for path in _index_folders(Path(folder)):
            one = Named(name=name or _name_of(path), modality=modality_of(path), path=path)
            other = found.setdefault((one.name, one.modality), one)
            if other is not one and other.path != path:
                raise UsageError(
                    f"{other.path} and {path} would both be {one.name!r} with modality {one.modality!r}",
                    next_step=f"give one of them another name: --name OTHER={path}",
                )
    return list(found.values())


def _index_folders(folder: Path) -> list[Path]:
    """The folder itself where it is an index, else the indices of the run in it."""
    folder = folder.resolve()
    refuse_unnameable(str(folder))
    if (folder / "CURRENT").is_file():
        return [folder]
    indices = folder / "index"
    below = sorted(path for path in indices.iterdir() if (path / "CURRENT").is_file()) if indices.is_dir() else []
    if not below:
        raise InputError(
            f"there is no index in {folder}", next_step=f"embq index {folder}, for the output of a run", code="no_index"
        )
    return below


def _name_of(index: Path) -> str:
    """The run's name for an index in its usual place, OUT/index/OUTPUT; else the folder's own."""
    return index.parent.parent.name if index.parent.name == "index" else index.name
