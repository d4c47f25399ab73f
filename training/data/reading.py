"""Shards to samples by webdataset, with what webdataset keeps to itself: that a shard is missing, cut or short."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from webdataset.gopen import gopen
from webdataset.tariterators import group_by_keys, tar_file_expander

from core.errors import SourceError
from sources.storage import source_errors
from sources.urls import is_url
from training.data.batch import Failure

RawSample = dict[str, Any]
"""`__key__`, `__url__`, and the bytes of each member by its lower-case extension."""


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

    def noted(error: Exception) -> bool:
        repeated.append(str(error.args[0]))
        return True

    try:
        with source_errors(url), closing(_opened(url)) as stream:
            members = tar_file_expander(iter([{"url": url, "stream": stream}]))
            for sample in group_by_keys(members, handler=noted):
                read += 1
                yield sample
    except SourceError as error:
        yield _lacking(url, error.code, error.message, read, count)
        return
    except (tarfile.TarError, EOFError, zlib.error, ValueError, AttributeError) as error:
        code = "shard_truncated" if "unexpected end" in str(error) else "shard_bad_header"
        told = f"{url}: cannot be read on behind {read} samples: {error.args[0] if error.args else error!r}"
        yield _lacking(url, code, told, read, count)
        return
    for name in repeated:
        yield Failure(shard=url, key="", code="duplicate_key", message=f"{name}; the first one is used", samples=0)
    if count is None and not read:
        yield _lacking(url, "shard_no_keys", f"{url}: there is no sample in it", read, count)
    elif count is not None and read != count:
        told = f"{url}: {read} samples could be read, and sizes.json says {count}"
        yield _lacking(url, "shard_count_mismatch", told, read, count)


def _opened(url: str) -> Any:
    """The bytes of a shard. A local file is opened here, because to webdataset a colon in a path begins a command."""
    return gopen(url) if is_url(url) else open(url, "rb")


def _lacking(url: str, code: str, message: str, read: int, count: int | None) -> Failure:
    return Failure(shard=url, key="", code=code, message=message, samples=1 if count is None else max(0, count - read))
