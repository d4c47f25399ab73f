"""The bytes of a shard: of a file of this machine, or what curl fetches for webdataset."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO

from webdataset.gopen import gopen

from core.errors import SourceError
from sources.storage import source_errors

HTTP = ("http://", "https://")

CURL_ENDED = {
    6: "its host is not known",
    7: "its server cannot be reached",
    18: "the connection ended in the middle of it",
    22: "its server refuses it: it is not there, may not be read, or the server failed for a minute",
    28: "its server is too slow",
    60: "its server's certificate cannot be verified",
}
"""What exit statuses of curl mean, as its manual has them."""

REFUSED = 22
"""Of curl: an HTTP status of 400 or more, which curl has tried again already where that may help."""


@contextmanager
def opened(url: str) -> Iterator[BinaryIO]:
    """A shard, open from its beginning, for the block. What goes wrong while it is read there is a SourceError too.

    webdataset is given nothing but http(s)://: of other names it would take the beginning for a kind of URL, and run
    some of them as commands.
    """
    if not url.startswith(HTTP):
        with source_errors(url), open(url, "rb") as file:
            yield file
        return
    try:
        with closing(gopen(url)) as stream:
            yield stream
    except OSError as error:
        told = re.search(r"exit (\d+)", str(error))
        status = int(told[1]) if told else 0
        why = CURL_ENDED.get(status, f"curl ended with status {status}" if told else str(error))
        raise SourceError(
            f"{url}: cannot be read: {why}",
            code="source_unreadable",
            next_step="check the name, the network and the server",
            transient=status != REFUSED,
        ) from error
