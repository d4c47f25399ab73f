"""From the command line to the application: opens indices, and says how versions and models are opened later."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import EmbqError, InputError
from embq.serving.app import Service, application
from embq.serving.index_discovery import Changes, Following, Named, Watcher, named_indices
from embq.serving.indices import Indices
from embq.serving.metrics import Metrics
from embq.serving.middleware import DoorRules
from embq.serving.query_models import Models, QueryModel
from embq.serving.search import Knn, Searches
from embq.serving.served_index import Opener, Recipe, Searchable, ServedIndex, Version

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from indexer.index_files.version import Version as Record


def opened_service(
    folders: Sequence[str],
    names: Sequence[str],
    *,
    follow: bool,
    memory: str,
    threads: int,
    with_models: bool,
    image_urls: bool,
    rules: DoorRules,
) -> Starlette:
    """The application over indices, all of which are open; models are loaded once it runs.

    Args:
        folders: of indices, or of runs with indices.
        names: NAME=FOLDER.
        follow: whether `folders` hold them at any depth, and may get more of them, or have none yet.
        memory: "ram" or "mmap".
        threads: of one search.

    Raises what `named_indices` and opening an index raise; InputError where a folder to follow is not there.
    """
    metrics = Metrics()
    opened = partial(_opened, opener=partial(_open, memory=memory, threads=threads))
    found = [] if follow and folders and not names else named_indices(() if follow else folders, names, _modality)
    indices = Indices([opened(one) for one in found])
    models = Models(
        _load if with_models else None, tell=lambda name: metrics.gauge("embq_model_ready").labels(name).set(1)
    )
    changes = Changes(metrics, models)
    for index in indices.all:
        changes.opened(index)
    following = _following(folders, indices, changes, opened) if follow else None
    service = Service(
        knn=Knn(indices, models, metrics, image_urls=image_urls),
        searches=Searches(indices, models, metrics),
        indices=indices,
        models=models,
        metrics=metrics,
        following=following,
        embq=version_of("embq"),
    )
    return application(
        service=service,
        models=models,
        indices=indices,
        watcher=Watcher(indices, changes.taken_up, following),
        metrics=metrics,
        rules=rules,
    )


def _following(
    folders: Sequence[str], indices: Indices, changes: Changes, opened: Callable[[Named], ServedIndex]
) -> Following:
    following = Following(
        _folders(folders),
        indices,
        opened=opened,
        modality_of=_modality,
        appeared=changes.appeared,
        gone=changes.gone,
    )
    following.look()
    return following


def _folders(given: Sequence[str]) -> list[Path]:
    folders = [Path(folder).resolve() for folder in given]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"there is no folder {folder} to follow", next_step="make it; it may be empty", code="no_index"
            )
    return folders


def _opened(one: Named, *, opener: Opener) -> ServedIndex:
    return ServedIndex(name=one.name, modality=one.modality, path=one.path, opener=opener, counted=_counted)


def _open(path: Path, *, memory: str, threads: int) -> tuple[Searchable, Version]:
    from indexer.searcher import Searcher

    searcher = Searcher.open(path, memory=memory, threads=threads)
    return searcher, _described(searcher.version)


def _described(record: Record) -> Version:
    collection = record.collection
    recipe = None
    if collection.model is not None:
        # The outputs of one model, images and texts, ask for the same vectors of a query.
        said = [collection.fingerprint, collection.model["output"]["spec"], collection.rows_spec]
        recipe = Recipe(model=collection.model, rows=collection.rows_spec, key=json.dumps(said, sort_keys=True))
    return Version(
        name=record.name,
        rows=record.n,
        ids=record.next_id,
        dim=record.plan.dim,
        cosine=record.plan.metric == "cosine",
        model="" if collection.model is None else str(collection.model["output"]["spec"]),
        fingerprint=collection.fingerprint,
        recipe=recipe,
        output=collection.output,
    )


def _counted(path: Path) -> int | None:
    """The rows of the collection of an index as it is now; None where it is gone, or was made into something else."""
    from core.storage.paths import place
    from indexer.collection.opening import open_collection
    from indexer.index_files.version import read_current

    try:
        was = read_current(path).collection
        now = open_collection(
            place(was.root),
            output=was.output if was.kind == "run" else None,
            column=was.column if was.kind in ("parquet", "hdf5") else None,
            file_format=was.kind if was.kind in ("npy", "parquet", "hdf5") else None,
        )
    except (EmbqError, OSError):
        return None
    return now.n


def _load(version: Version) -> QueryModel:
    """The model of a version, ready for whatever kinds of queries it embeds."""
    from embq.searching.embedding import QueryEmbedder

    assert version.recipe is not None
    embedder = QueryEmbedder.open(version.recipe.model, version.recipe.rows, version.fingerprint)
    for modality in embedder.modalities:
        embedder.load(modality)
    return embedder


def _modality(path: Path) -> str:
    """What an index holds, from the name of its vectors: text, text_embedding, img_emb, clip_image and so on."""
    from indexer.index_files.version import read_current

    return "text" if "text" in read_current(path).collection.output else "image"
