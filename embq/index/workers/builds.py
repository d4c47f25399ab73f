"""Index builds in the broker: one record for each build in progress, which its conductor renews.

A stage of a build is a run of its own in the broker, so leases, heartbeats and lost workers are those of every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import msgspec
import redis

from embq.core import wire
from embq.core.broker.client import now_ms
from embq.core.errors import MalformedError
from embq.core.queue import hints, keys
from embq.core.queue.keys import INDEXING, INDEXING_MS, RUN_PARTS, run_key
from embq.core.queue.scripts import Script
from embq.core.storage import beneath
from embq.core.storage.paths import Place
from embq.core.units import content_hash
from embq.core.wire import Count, PathText, StageId, Word

RECORD = "record of an index build"
"""Noun for messages."""

SHARED = ".shared"
"""File with the record's nonce in the folder of a build: a worker that can read it shares the conductor's storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBuild:
    """An index build that workers share.

    Attributes:
        index: absolute path of the index's folder, or its URL.
        build: id of the build.
        folder: folder of its sidecars, absolute, or their URL.
        nonce: content of `SHARED` there.
        memory_bytes: limit for all processes of one machine together.
    """

    kind: ClassVar[str] = INDEXING

    index: PathText
    build: Word
    folder: PathText
    nonce: Word
    memory_bytes: Count

    @property
    def name(self) -> str:
        """Name for people."""
        return self.index

    @property
    def queue_key(self) -> str:
        """Name of its queue of hints, and of its share of the workers' time."""
        return f"index.{content_hash([self.index, self.build])[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStage:
    """The stage of a build that is in progress.

    Attributes:
        stage: name of the stage, for people.
        run: id of the run that the stage is in the broker.
        seen_ms: time of the conductor's last renewal, by the broker's clock.
    """

    build: IndexBuild
    stage: Word
    run: StageId
    seen_ms: Count = 0

    def to_json(self) -> str:
        """The record as JSON text."""
        return json.dumps({"v": keys.VERSION, **msgspec.to_builtins(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> IndexStage | None:
        """The record in `text`; None if another version of embq wrote it; MalformedError for anything else."""
        fields = wire.read_version(text, keys.VERSION, what=RECORD)
        return None if fields is None else wire.convert(cls, fields, what=RECORD)


def read_nonce(folder: Place) -> str:
    """The nonce in the folder of a build; OSError if there is none, OutsideError or MalformedError if it is no such
    file."""
    return beneath.read_bytes(folder, SHARED, most_bytes=1_000).decode(errors="replace").strip()


def announce(client: redis.Redis, stage: IndexStage) -> None:
    """Record that a stage is in progress, or renew the record."""
    client.hset(INDEXING, stage.build.queue_key, replace(stage, seen_ms=now_ms(client)).to_json())


def announced(client: redis.Redis) -> list[IndexStage]:
    """The builds that have a conductor."""
    return [stage for _, _, stage, renewed in _builds(client) if renewed]


def forget_abandoned(client: redis.Redis, *, scripts: Mapping[str, Script]) -> None:
    """Remove the records, runs and hints of builds whose conductor is gone."""
    for queue_key, text, stage, renewed in _builds(client):
        if not renewed:
            _forget(client, queue_key, text, stage, scripts)


def _builds(client: redis.Redis) -> Iterator[tuple[str, bytes, IndexStage, bool]]:
    """(queue key, record, its stage, whether a conductor renewed it recently) of each build of this version."""
    records = cast("dict[bytes, bytes]", client.hgetall(INDEXING))
    now = now_ms(client) if records else 0
    for key, text in records.items():
        try:
            stage = IndexStage.from_json(text)
            if stage is None:
                continue
            if stage.build.queue_key.encode() != key:
                raise wire.malformed(RECORD, f"it is of another queue, {stage.build.queue_key}")
        except MalformedError as error:
            wire.skipped(RECORD, key, error)
            continue
        yield key.decode(), text, stage, abs(now - stage.seen_ms) <= INDEXING_MS


def withdraw(client: redis.Redis, build: IndexBuild, *, scripts: Mapping[str, Script]) -> None:
    """Remove a build, the run of its stage, and its hints."""
    for queue_key, text, stage, _ in _builds(client):
        if queue_key == build.queue_key:
            _forget(client, queue_key, text, stage, scripts)


def _forget(client: redis.Redis, queue_key: str, text: bytes, stage: IndexStage, scripts: Mapping[str, Script]) -> None:
    keys = [INDEXING, *(run_key(stage.run, part) for part in RUN_PARTS)]
    if scripts["forget"](keys=keys, args=[queue_key, text], client=client):
        # Where the conductor returns at this moment, the hints that it loses are pushed again.
        hints.remove(client, hints.hint_queue(client, queue_key))
