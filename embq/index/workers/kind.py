"""Builds of an index as a kind of work of workers, see `embq.core.queue.other_work.Kind`.

The worker's side is imported where a worker serves it: a producer looks after the records only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import redis

from embq.core.queue.other_work import OtherWork
from embq.core.service.log import Events
from embq.index.workers import builds
from embq.index.workers.builds import IndexBuild, forget_abandoned

if TYPE_CHECKING:
    from embq.worker.claim.scheduler import Turn
    from embq.worker.context import WorkerContext

__all__ = ["access", "announced", "forget_abandoned", "serve"]


def announced(client: redis.Redis) -> list[tuple[str, OtherWork]]:
    """(run of the stage in progress, build) of all builds with a conductor."""
    return [(stage.run, stage.build) for stage in builds.announced(client)]


def access(roots: tuple[str, ...]) -> Callable[[OtherWork], bool]:
    """Return a function that tells whether this process can take part in a build."""
    from embq.index.workers.access import IndexAccess

    return cast("Callable[[OtherWork], bool]", IndexAccess(roots).able)


def serve(context: WorkerContext, turn: Turn) -> Turn | None:
    """Serve the build of a turn; return the turn after it, or None."""
    from embq.index.workers.service import IndexService

    build = cast("IndexBuild", turn.model)
    Events("worker").info("index_turn", index=build.index, build=build.build)
    return IndexService(context, turn, build).serve()
