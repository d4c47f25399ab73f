"""Serves the shards of a folder over HTTP, read-only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from embq.core.networks import HostNames
from embq.core.settings import allowed_hosts
from embq.training.shards.sizes import CLASSES, SIZES

SUFFIXES = (".tar", ".parquet")
"""Suffixes of the files that are served, as by nginx in the stack (deploy/nginx.conf)."""

BESIDE = (SIZES, CLASSES)


class Piecewise(FileResponse):
    """A file response in large chunks, with ranges and an ETag."""

    chunk_size = 1 << 20


def app(folder: Path, *, host: str) -> Starlette:
    """Answer GET and HEAD for shards, tables, `sizes.json` and `classes.json` in a folder and below it.

    All else is not found: other files, hidden ones, folders, and what a link or a path leads to outside of the folder.

    Args:
        host: where it listens.
    """
    root, hosts = os.path.realpath(folder), HostNames(allowed_hosts(), listens_on=host)

    async def file(request: Request) -> Response:
        if not hosts.accept(request.headers.get("host", "")):
            why = "this server answers to its own addresses and names only: EMBQ_ALLOW_HOSTS adds names\n"
            return PlainTextResponse(why, status_code=421)
        served = find(root, request.scope["path"])
        if served is None:
            return PlainTextResponse("not found\n", status_code=404)
        path, status = served
        return Piecewise(path, media_type="application/octet-stream", stat_result=status)

    return Starlette(routes=[Route("/{path:path}", file, methods=["GET", "HEAD"])])


def find(root: str, path: str) -> tuple[str, os.stat_result] | None:
    """The file that the path of a request names, and its status; None if nothing is served.

    Args:
        root: real path of the folder.
        path: decoded, with a slash before it.
    """
    names = path.removeprefix("/").split("/")
    if not all(name and not name.startswith(".") and "\0" not in name for name in names):
        return None
    if not (names[-1].endswith(SUFFIXES) or names[-1] in BESIDE):
        return None
    real_path = os.path.realpath(os.path.join(root, *names))
    try:
        if os.path.commonpath([root, real_path]) != root:
            return None
        status = os.stat(real_path)
    except OSError:
        return None
    return (real_path, status) if stat.S_ISREG(status.st_mode) and os.access(real_path, os.R_OK) else None
