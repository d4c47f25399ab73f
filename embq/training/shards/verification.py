"""Verifies shards: each is complete, and all agree with each other and with sizes.json and classes.json."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from embq.core.errors import InputError, SampleError, SourceError, UsageError
from embq.core.storage.durable import overwrite
from embq.core.storage.paths import is_url
from embq.sources.access.files import load_unchanged
from embq.sources.decode import IMAGE_EXTENSIONS, decode_file, decode_metadata
from embq.sources.formats.tar import TarSource, split_name, unpacked
from embq.sources.formats.tar_headers import TarMember
from embq.sources.interface import SAMPLE_MAX_BYTES, Memory, unwatched
from embq.sources.reader_options import ReadOptions
from embq.training.shards.names import expand, folder_of, name_of, parts
from embq.training.shards.pictures import class_index
from embq.training.shards.processes import each
from embq.training.shards.shard_set import missing_shards
from embq.training.shards.sizes import SIZES, classes_beside, rendered, sizes_beside
from embq.training.shards.writing import require_decodable

SHOWN = 20
"""Violations of a kind that are listed for a shard; all are counted."""

EXPECTED = ("cls", "txt")
"""Members that all samples have, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A defect of a shard or a sample.

    Attributes:
        code: as in docs/reference/failure-codes.md.
        where: shard, and sample or member in it.
    """

    code: str
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """Content and defects of one shard.

    Attributes:
        url: the shard.
        samples: in it; None if it is damaged.
        bytes: as it is stored.
        keys: of its samples, in order.
        members: extension -> samples that have it.
        without: of `EXPECTED` -> the first keys that lack it.
        violations: up to `SHOWN` of each code.
        total: violations.
    """

    url: str
    samples: int | None = None
    bytes: int = 0
    keys: tuple[str, ...] = ()
    members: Counter[str] = field(default_factory=Counter)
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)
    violations: tuple[Violation, ...] = ()
    total: int = 0


def inspect(url: str, *, classes: int | None, decode: bool) -> Inspected:
    """Read a shard from its first byte to its last; a shard that cannot be read is one violation.

    Args:
        classes: how many there are; None if that is not known.
        decode: whether each image is decoded.
    """
    try:
        (unit,) = TarSource().split(url, ReadOptions())
        data, members = unpacked(load_unchanged(unit, "shard_changed", unwatched), url, unwatched)
    except SourceError as error:
        message = error.message.removeprefix(f"{url}: ")
        return Inspected(url=url, violations=(Violation(code=error.code, where=url, message=message),), total=1)
    samples, faults = _grouped(members, url)
    faults += [fault for sample in samples.items() for fault in _of_sample(url, *sample, data, classes, decode=decode)]
    kinds: Counter[str] = Counter()
    shown = [fault for fault in faults if (kinds.update([fault.code]), kinds[fault.code])[1] <= SHOWN]
    lacking = {name: [key for key, parts in samples.items() if name not in parts] for name in EXPECTED}
    return Inspected(
        url=url,
        samples=len(samples),
        bytes=unit.stop,
        keys=tuple(samples),
        members=Counter(extension for parts in samples.values() for extension in parts),
        without={name: tuple(keys[:SHOWN]) for name, keys in lacking.items()},
        violations=tuple(shown),
        total=len(faults),
    )


def _grouped(members: Sequence[TarMember], url: str) -> tuple[dict[str, dict[str, TarMember]], list[Violation]]:
    """Key -> extension -> member; what webdataset would read otherwise than embq is a violation.

    webdataset takes neighbours for a sample, and stops at a name that occurs again in it.
    """
    samples: dict[str, dict[str, TarMember]] = {}
    faults: list[Violation] = []
    last = ""
    for member in members:
        key, extension = split_name(member.name)
        where = f"{url} {member.name}"
        if not key:
            faults.append(Violation(code="no_key", where=where, message="a name without a key belongs to no sample"))
            continue
        if key != last and key in samples:
            message = f"at byte {member.at}, apart from the other members of its sample"
            faults.append(Violation(code="scattered_key", where=where, message=message))
        last = key
        parts = samples.setdefault(key, {})
        if extension in parts:
            message = f"occurs again at byte {member.at}; the first one is at byte {parts[extension].at}"
            faults.append(Violation(code="duplicate_key", where=where, message=message))
        else:
            parts[extension] = member
    return samples, faults


def _of_sample(
    url: str, key: str, parts: dict[str, TarMember], data: Memory, classes: int | None, *, decode: bool
) -> Iterator[Violation]:
    """Violations of one sample."""
    images = [extension for extension in IMAGE_EXTENSIONS if extension in parts]
    if not images:
        yield Violation(code="missing_member", where=f"{url} {key}", message=f"no image; it has {', '.join(parts)}")
    for extension, member in parts.items():
        where = f"{url} {member.name}"
        try:
            _require_plain(member)
            content = data[member.start : member.stop]
            if extension == "cls":
                class_index(content, classes)
            elif extension == "txt":
                if not decode_file(content).strip():
                    raise SampleError("empty_text", "the caption is empty or white space")
            elif extension == "json":
                decode_metadata(content)
            elif decode and extension in images:
                require_decodable(content)
        except SampleError as error:
            yield Violation(code=error.code, where=where, message=error.message)


def _require_plain(member: TarMember) -> None:
    size = member.stop - member.start
    if not member.regular:
        raise SampleError("unsupported_member", "is a link, a device or a sparse file")
    if size > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"has {size:,} bytes, more than {SAMPLE_MAX_BYTES:,}")


KEPT = 1000
"""Violations that a report lists; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsReport:
    """Result of a verification.

    Attributes:
        shards: that were read.
        samples: in those that are whole.
        bytes: of all of them.
        members: extension -> samples that have it.
        counted: whether there was a `sizes.json` to compare with.
        written: whether `sizes.json` was written.
        violations: the first of them.
        violations_total: all of them.
    """

    shards: int
    samples: int
    bytes: int
    members: dict[str, int]
    counted: bool
    violations: tuple[Violation, ...]
    violations_total: int
    written: bool = False

    @property
    def ok(self) -> bool:
        """True if there are no violations."""
        return not self.violations_total


def verify(
    expressions: Sequence[str],
    read: Callable[[Inspected, int], None] = lambda *_: None,
    *,
    processes: int,
    decode: bool = False,
    allow_missing: bool = False,
    write_sizes: bool = False,
) -> ShardsReport:
    """Read shards, named as for `open_shards`, and compare them with each other and with the files beside them.

    Args:
        read: called for each shard that was read, with the number of all.
        processes: that read at once.
        decode: whether each image is decoded.
        allow_missing: whether some samples may lack the class or the caption that others have.
        write_sizes: whether `sizes.json` is written, if every shard is complete, instead of compared.

    Raises InputError if no shards are named, UsageError to write sizes for shards behind URLs; what is wrong with the
    shards is in the report.
    """
    urls = list(dict.fromkeys(url for expression in expressions for url in expand(expression)))
    remote = [url for url in urls if is_url(url)]
    if write_sizes and remote:
        raise UsageError(f"{remote[0]}: {SIZES} cannot be written there", next_step="count them where they are stored")
    folders = list(dict.fromkeys(map(folder_of, urls)))
    classes = {folder: len(names) for folder in folders if (names := classes_beside(folder)) is not None}
    sizes = {} if write_sizes else {folder: sizes_beside(folder) for folder in folders}
    by_url: dict[str, Inspected] = {}
    inspecting = partial(_inspected, classes, decode)
    for shard in each(inspecting, urls, min(processes, len(urls)), connects=bool(remote)):
        by_url[shard.url] = shard
        read(shard, len(urls))
    shards = [by_url[url] for url in urls]
    rest = [*_missing_shards([] if write_sizes else expressions, urls), *_miscounted(shards, sizes), *_repeated(shards)]
    rest += [] if allow_missing else _unlike(shards)
    violations = [violation for shard in shards for violation in shard.violations] + rest
    written = write_sizes and all(shard.samples is not None for shard in shards)
    for folder in folders if written else ():
        _rewrite(Path(folder), {name_of(tar.url): tar.samples or 0 for tar in shards if folder_of(tar.url) == folder})
    return ShardsReport(
        shards=len(shards),
        samples=sum(shard.samples or 0 for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        members=dict(sorted(sum((shard.members for shard in shards), Counter()).items())),
        counted=bool(sizes) and all(counts is not None for counts in sizes.values()),
        violations=tuple(violations[:KEPT]),
        violations_total=sum(shard.total for shard in shards) + len(rest),
        written=written,
    )


def _rewrite(folder: Path, counted: Mapping[str, int]) -> None:
    """Update the counts in a folder's file; those of shards that are gone are removed."""
    try:
        recorded = sizes_beside(str(folder)) or {}
    except InputError:  # something else stands there
        recorded = {}
    existing = {name: count for name, count in recorded.items() if (folder / name).exists()}
    overwrite(folder / SIZES, rendered(dict(sorted((existing | dict(counted)).items()))))


def _inspected(classes: Mapping[str, int], decode: bool, url: str) -> Inspected:
    return inspect(url, classes=classes.get(folder_of(url)), decode=decode)


def _missing_shards(expressions: Sequence[str], urls: Sequence[str]) -> list[Violation]:
    folders = [part for expression in expressions for part in parts(expression) if os.path.isdir(part)]
    return [
        Violation(code="sizes_differ", where=os.path.join(folder, name), message=f"is in {SIZES}, and not there")
        for folder in folders
        for name in missing_shards(folder, urls)
    ]


def _miscounted(shards: Sequence[Inspected], sizes: Mapping[str, Mapping[str, int] | None]) -> list[Violation]:
    wrong = []
    for shard in shards:
        counts = sizes.get(folder_of(shard.url))
        if counts is None or shard.samples is None:
            continue
        size = counts.get(name_of(shard.url))
        if size != shard.samples:
            claim = f"does not name it; it has {shard.samples:,} samples" if size is None else f"says {size:,} samples"
            message = f"{SIZES} {claim}" + ("" if size is None else f", it has {shard.samples:,}")
            wrong.append(Violation(code="sizes_differ", where=shard.url, message=message))
    return wrong


def _repeated(shards: Sequence[Inspected]) -> list[Violation]:
    """Keys that occur in several shards of one series, such as train-000000.tar and train-000001.tar."""
    series: dict[str, dict[str, str]] = {}
    wrong = []
    for shard in shards:
        alike = series.setdefault(re.sub(r"[0-9]+(?=[^0-9]*$)", "", shard.url), {})
        again = [key for key in shard.keys if key in alike]
        if again:
            message = f"{len(again):,} keys are in other shards too, the first is {again[0]!r} of {alike[again[0]]}"
            wrong.append(Violation(code="duplicate_key", where=shard.url, message=message))
        alike.update((key, name_of(shard.url)) for key in shard.keys)
    return wrong


def _unlike(shards: Sequence[Inspected]) -> list[Violation]:
    """Samples without the class or the caption that others have."""
    wrong = []
    for name in EXPECTED:
        if not any(other.members[name] for other in shards):
            continue
        for shard in shards:
            if keys := shard.without.get(name):
                lacking = (shard.samples or 0) - shard.members[name]
                message = f"{lacking:,} samples have no {name}, as others have; the first is {keys[0]!r}"
                wrong.append(Violation(code="missing_member", where=shard.url, message=message))
    return wrong
