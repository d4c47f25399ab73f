"""Finds the images of served shards before anybody asks: a walk through a shard of 10,000 images takes 0.15 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from embq.app.serving.indices import Indices
from embq.app.ui.thumbnails.images import Images
from embq.core.errors import EmbqError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.units import Unit

if TYPE_CHECKING:
    from embq.indexer.collection.collection import Collection

LOOK_S = 5.0
"""Between looks for new versions of indexes."""

WORK_S = 120.0
"""Time of walks for one version: 8,000,000 images; those of other shards are found when they are asked for."""


class LookAhead:
    """A thread that walks through the shards of each version once, half of the time at most and only while no
    thumbnail is being made.

    Args:
        is_busy: whether one is.
    """

    def __init__(self, indices: Indices, images: Images, *, is_busy: Callable[[], bool]) -> None:
        self._indices, self._images, self._is_busy = indices, images, is_busy
        self._stopped = threading.Event()
        self._visited: set[tuple[str, str, str]] = set()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="look-ahead", daemon=True).start()

    def stop(self) -> None:
        """End it after the shard in hand."""
        self._stopped.set()

    def _work(self) -> None:
        while not self._stopped.is_set():
            for index in self._indices.all:
                if index.modality != "image":
                    continue
                try:
                    with index.use() as version:
                        name, collection = version.info.name, version.searcher.version.collection
                    if (identity := (index.name, index.modality, name)) not in self._visited:
                        self._visited.add(identity)
                        self._walk(collection)
                except (EmbqError, OSError):  # the request for the thumbnail reports it
                    continue
            self._stopped.wait(LOOK_S)

    def _walk(self, collection: Collection) -> None:
        left_s = WORK_S
        for unit in units_of(collection):
            while self._is_busy() and not self._stopped.is_set():
                time.sleep(0.05)
            if left_s <= 0 or self._stopped.is_set():
                return
            began = time.monotonic()
            try:
                self._images.look_ahead(unit)
            except (EmbqError, OSError):
                continue
            finally:
                took_s = time.monotonic() - began
                left_s -= took_s
                self._stopped.wait(took_s)


def units_of(collection: Collection) -> Iterator[Unit]:
    """The units of the runs of a collection; raises as reading a manifest does."""
    roots = [collection.run_of(part.first_id) for part in collection.parts if part.rows]
    for root in dict.fromkeys(root for root in roots if root is not None):
        manifest = Manifest(Layout(root))
        for number in range(len(manifest)):
            yield manifest.unit(number)
