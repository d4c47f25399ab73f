"""The packages that `embq run` needs for all of its roles, looked for before anything is planned or started."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from embq.core.errors import MissingPackageError
from embq.core.extras import EXTRA_OF, PACKAGES, refuse_missing
from embq.core.storage.object_clients import NEEDED
from embq.core.storage.paths import is_url
from embq.sources.access.urls import SCHEMES, scheme_of

if TYPE_CHECKING:
    from embq.producer.enqueue import Request


def refuse_lacking(request: Request, *, own_broker: bool, logs: Sequence[str]) -> None:
    """Raise MissingPackageError, with one command for all, if packages that the run needs are not installed.

    Args:
        own_broker: whether this machine starts the broker.
        logs: targets of `--log`.
    """
    needed = {"numpy", *(target.partition(":")[0] for target in logs)}
    if own_broker:
        needed.update(_of_own_broker())
    for source in request.inputs:
        needed.update(PACKAGES.get(SCHEMES.get(scheme_of(source), "")[5:-1], ()) if is_url(source) else ())
    if request.format == "hdf5":
        needed.add("h5py")
    if is_url(str(request.output)):
        needed.add(NEEDED[scheme_of(str(request.output))])
    needed.update(_of_models(request))
    refuse_missing(package for package in needed if package in EXTRA_OF)


def _of_own_broker() -> tuple[str, ...]:
    from embq.core.broker.embedded import server_binary

    try:
        server_binary()
    except MissingPackageError as error:
        return (str(error.name),)
    return ()


def _of_models(request: Request) -> set[str]:
    from embq.producer.model_args import asked_models

    needed: set[str] = set()
    with suppress(ImportError):  # of what finds the model, in the same extra
        for model in asked_models(request.models):
            needed.update(model.spec.model_family.packages)
    if request.chunking is not None:
        needed.add("semantic_text_splitter")
    if request.precision == "int8" and needed:
        needed.update(PACKAGES["int8"])
    return needed
