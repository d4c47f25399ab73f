"""Samples of shards, read by webdataset, with an account of what is missing, damaged or repeated."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, BinaryIO

from webdataset.tariterators import group_by_keys, tar_file_expander

from embq.core.errors import SourceError
from embq.core.service.log import Events
from embq.core.storage.objects import RangedFile
from embq.sources.access.files import source_errors, stat_file
from embq.sources.access.ranged_reads import RangesAhead
from embq.sources.access.urls import is_http
from embq.sources.interface import unwatched
from embq.training.data.batch import Failure

RawSample = dict[str, Any]
"""`__key__`, `__url__`, and the bytes of each member by its lower-case extension."""

ATTEMPTS = 3
"""Attempts to read a shard to its end, beside those for each request: a training reads shards for days."""

log = Events("training")


def open_shard(url: str) -> BinaryIO:
    """A shard from its beginning: a local file, or one behind http(s), of which ranges are fetched ahead.

    webdataset opens no names itself, because it runs those of some kinds as commands. Raises SourceError, later reads
    of a local file OSError.
    """
    if is_http(url):
        size = stat_file(url).size
        ranges = RangesAhead(url, size, first=0, last=size, on_progress=unwatched)
        return io.BufferedReader(RangedFile(ranges, size), 1 << 20)
    with source_errors(url):
        return open(url, "rb")


def read_shards(sources: Iterable[dict[str, Any]], *, counts: Mapping[str, int]) -> Iterator[RawSample | Failure]:
    """The samples of shards, one shard after the other, with a failure behind each shard that is not whole.

    Args:
        sources: the `url` of each shard, a path or http(s)://.
        counts: URL -> samples, if they are known.
    """
    for source in sources:
        yield from read_shard(source["url"], counts.get(source["url"]))


def read_shard(url: str, count: int | None) -> Iterator[RawSample | Failure]:
    """The samples of a shard, and a failure for those that are missing of `count`.

    Without a count damage may go unnoticed: tarfile takes a bad header behind the first one for the end.
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
        message = f"{name} is there again; the first one is used"
        yield Failure(shard=url, key="", code="duplicate_key", message=message, samples=0)
    if count is None and not read:
        yield _lacking(url, "shard_no_keys", "there is no sample in it", read, count)
    elif count is not None and read != count:
        message = f"there are {read} samples in it, and sizes.json says {count}"
        yield _lacking(url, "shard_count_mismatch", message, read, count)


def _samples(url: str, repeated: list[str]) -> Iterator[RawSample]:
    """The samples of a shard; names of repeated members go to `repeated`. SourceError if it cannot be read."""

    def noted(error: Exception) -> bool:
        repeated.append(str(error.args[0]).partition(": duplicate")[0])
        return True

    try:
        with source_errors(url), open_shard(url) as stream:
            yield from group_by_keys(tar_file_expander(iter([{"url": url, "stream": stream}])), handler=noted)
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        # webdataset adds the name of a Python object.
        what = str(error.args[0] if error.args else error).partition(" @ ")[0]
        code = "shard_truncated" if "unexpected end" in what else "shard_bad_header"
        raise SourceError(f"{url}: is damaged: {what}", code=code) from error


def _lacking(url: str, code: str, message: str, read: int, count: int | None) -> Failure:
    message = message.removeprefix(f"{url}: ")  # the failure has it as `shard`
    return Failure(shard=url, key="", code=code, message=message, samples=1 if count is None else max(0, count - read))
