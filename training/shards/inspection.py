"""Reads one shard from its first byte to its last, and says what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.errors import SampleError, SourceError
from sources.base import Memory, ReadOptions, unwatched
from sources.fields import IMAGE_EXTENSIONS, decode_file, decode_metadata
from sources.storage import SAMPLE_MAX_BYTES, load_unchanged
from sources.tar import TarSource, split_name, unpacked
from sources.tar_members import Member

SHOWN = 20
"""Violations of a kind that a shard tells of; the others are counted."""

EXPECTED = ("cls", "txt")
"""What all samples have, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that is not as it has to be.

    Attributes:
        code: as in docs/operations.md.
        where: shard, and sample or member in it.
    """

    code: str
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """One shard.

    Attributes:
        url: the shard.
        samples: in it; None where it is damaged.
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
    """What is in a shard, and what is wrong with it; a shard that cannot be read is one violation.

    Args:
        classes: how many there are; None where that is not known.
        decode: whether each image is decoded.
    """
    try:
        (unit,) = TarSource().split(url, ReadOptions())
        data, members = unpacked(load_unchanged(unit, "shard_changed", unwatched), url, unwatched)
    except SourceError as error:
        message = error.message.removeprefix(f"{url}: ")
        return Inspected(url=url, violations=(Violation(code=error.code, where=url, message=message),), total=1)
    samples, found = _grouped(members, url)
    found += [one for sample in samples.items() for one in _of_sample(url, *sample, data, classes, decode=decode)]
    kinds: Counter[str] = Counter()
    shown = [one for one in found if (kinds.update([one.code]), kinds[one.code])[1] <= SHOWN]
    lacking = {name: [key for key, parts in samples.items() if name not in parts] for name in EXPECTED}
    return Inspected(
        url=url,
        samples=len(samples),
        bytes=unit.stop,
        keys=tuple(samples),
        members=Counter(extension for parts in samples.values() for extension in parts),
        without={name: tuple(keys[:SHOWN]) for name, keys in lacking.items()},
        violations=tuple(shown),
        total=len(found),
    )


def _grouped(members: Sequence[Member], url: str) -> tuple[dict[str, dict[str, Member]], list[Violation]]:
    """Key -> extension -> member; what webdataset would read otherwise than embq is a violation.

    webdataset takes neighbours for a sample, and stops at a name that occurs again in it.
    """
    samples: dict[str, dict[str, Member]] = {}
    found: list[Violation] = []
    last = ""
    for member in members:
        key, extension = split_name(member.name)
        where = f"{url} {member.name}"
        if not key:
            found.append(Violation(code="no_key", where=where, message="a name without a key belongs to no sample"))
            continue
        if key != last and key in samples:
            message = f"at byte {member.at}, apart from the other members of its sample"
            found.append(Violation(code="scattered_key", where=where, message=message))
        last = key
        parts = samples.setdefault(key, {})
        if extension in parts:
            message = f"occurs again at byte {member.at}; the first one is at byte {parts[extension].at}"
            found.append(Violation(code="duplicate_key", where=where, message=message))
        else:
            parts[extension] = member
    return samples, found


def _of_sample(
    url: str, key: str, parts: dict[str, Member], data: Memory, classes: int | None, *, decode: bool
) -> Iterator[Violation]:
    """What is wrong with one sample."""
    images = [extension for extension in IMAGE_EXTENSIONS if extension in parts]
    if not images:
        yield Violation(code="missing_member", where=f"{url} {key}", message=f"no image; it has {', '.join(parts)}")
    for extension, member in parts.items():
        where = f"{url} {member.name}"
        try:
            _require_plain(member)
            content = data[member.start : member.stop]
            if extension == "cls":
                _require_class(content, classes)
            elif extension == "txt":
                if not decode_file(content).strip():
                    raise SampleError("empty_text", "the caption is empty or white space")
            elif extension == "json":
                decode_metadata(content)
            elif decode and extension in images:
                from training.shards.checking import require_decodable

                require_decodable(content)
        except SampleError as error:
            yield Violation(code=error.code, where=where, message=error.message)


def _require_plain(member: Member) -> None:
    size = member.stop - member.start
    if not member.regular:
        raise SampleError("unsupported_member", "is a link, a device or a sparse file")
    if size > SAMPLE_MAX_BYTES:
        raise SampleError("too_large", f"has {size:,} bytes, more than {SAMPLE_MAX_BYTES:,}")


def _require_class(content: bytes, classes: int | None) -> None:
    if not content.isdigit():
        raise SampleError("bad_class", f"{content[:20]!r} is not the index of a class")
    if classes is not None and int(content) >= classes:
        raise SampleError("bad_class", f"class {int(content)} is none of the {classes} of classes.json, from 0")
