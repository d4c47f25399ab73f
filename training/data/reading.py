"""Shards to samples by webdataset, with what webdataset keeps to itself: that a shard is missing, cut or short."""

from __future__ import annotations

import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, BinaryIO

from webdataset.gopen import gopen
from webdataset.tariterators import group_by_keys, tar_file_expander

from core.errors import SourceError
from core.service.log import Events
from sources.access.files import source_errors
from training.data.batch import Failure

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


RawSample = dict[str, Any]
"""`__key__`, `__url__`, and the bytes of each member by its lower-case extension."""

ATTEMPTS = 3
"""To read a shard to its end, where the storage may only have hiccuped: a training reads shards for days."""

log = Events("training")


def read_shards(sources: Iterable[dict[str, Any]], *, counts: Mapping[str, int]) -> Iterator[RawSample | Failure]:
    """The samples of shards, one shard after the other, each with a failure at its end if it is not whole.

    Args:
        sources: of each shard its `url`, a path or http(s)://.
        counts: URL -> number of samples, for shards of which it is known.
    """
    for source in sources:
        yield from read_shard(source["url"], counts.get(source["url"]))


def read_shard(url: str, count: int | None) -> Iterator[RawSample | Failure]:
    """The samples of a shard, and a failure for those that it lacks of `count`.

    Without a count, damage can go unseen: tarfile takes a bad header behind the first one for the end.
    """
    read = 0
    repeated: list[str] = []
    for attempt in range(1, ATTEMPTS + 1):
        repeated.clear()
        try:
            for sample in islice(_samples(url, repeated), read, None):
                read += 1
                yield sample
            break
        except SourceError as error:
            if not error.transient or attempt == ATTEMPTS:
                behind = f" (behind {read} samples)" if read else ""
                yield _lacking(url, error.code, error.message + behind, read, count)
                return
            log.warning("shard_read_again", source=url, code=error.code, why=error.message)
    for name in repeated:
        told = f"{name} is there again; the first one is used"
        yield Failure(shard=url, key="", code="duplicate_key", message=told, samples=0)
    if count is None and not read:
        yield _lacking(url, "shard_no_keys", "there is no sample in it", read, count)
    elif count is not None and read != count:
        told = f"there are {read} samples in it, and sizes.json says {count}"
        yield _lacking(url, "shard_count_mismatch", told, read, count)


def _samples(url: str, repeated: list[str]) -> Iterator[RawSample]:
    """The samples of a shard; the names of members that are there again go to `repeated`.

    Raises SourceError where it cannot be read on.
    """

    def noted(error: Exception) -> bool:
        repeated.append(str(error.args[0]).partition(": duplicate")[0])
        return True

    try:
        with opened(url) as stream:
            yield from group_by_keys(tar_file_expander(iter([{"url": url, "stream": stream}])), handler=noted)
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        # webdataset adds the name of a Python object.
        what = str(error.args[0] if error.args else error).partition(" @ ")[0]
        code = "shard_truncated" if "unexpected end" in what else "shard_bad_header"
        raise SourceError(f"{url}: is damaged: {what}", code=code) from error


def _lacking(url: str, code: str, message: str, read: int, count: int | None) -> Failure:
    told = message.removeprefix(f"{url}: ")  # which stands beside it
    return Failure(shard=url, key="", code=code, message=told, samples=1 if count is None else max(0, count - read))
