"""Kind "tar": webdataset shards, plain or compressed. A shard passes whole or fails whole, unless the samples before
its damage are to be kept; no member is extracted, decoded or followed."""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import islice, takewhile
from typing import NamedTuple

from embq.core.errors import SampleError, SourceError
from embq.core.process.limits import decoded_bytes
from embq.core.service.log import Events
from embq.core.storage.paths import is_url
from embq.core.units import Sample, Unit
from embq.sources.access.files import forget_cached, give_back, load_unchanged, source_errors, stat_file, view_of
from embq.sources.damaged import SamplesDigest, keeps_damaged, rest_of, with_samples
from embq.sources.decode import decode_file, decode_metadata, unread_counted
from embq.sources.extensions import ALL, Extensions, extensions_of, of_system
from embq.sources.formats.compressed import beginning, unpack_to_cut
from embq.sources.formats.tar_headers import BLOCK, Archive, TarMember, parse_first_members, parse_members, walk
from embq.sources.interface import SAMPLE_MAX_BYTES, Memory, Moved, Source, unwatched
from embq.sources.reader_options import ReadOptions
from embq.sources.rows import NO_TEXTS

log = Events("sources")

LOOKED_AT_BYTES = 2 << 20
"""First bytes of a shard in which metadata are looked for: about a hundred small images."""

SUFFIX = ".tar"
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")

MEMBER_BYTES = 1500
"""Memory that a member takes beside its content: itself, its name, and its entry in a sample."""


class TarSource(Source):
    """Shards as units. Members that share a key are one sample, wherever in the shard they stand.

    Image: the first of `IMAGE_EXTENSIONS` that the key has. Caption: `txt`. The user may name others. Metadata:
    `json`. Members without a key (no dot in the name, or nothing before it) and those about the shard, such as
    `__index__.json`, belong to no sample, as in webdataset; a shard of only such members is an error.
    """

    kind = "tar"
    modalities: tuple[str, ...] = ("image", "text")

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """One unit, from the file's status alone."""
        status = stat_file(path)
        yield Unit(kind=self.kind, source=path, stop=status.size, etag=status.version, options=options.of_shards)

    def holds(self, path: str, options: ReadOptions) -> tuple[str, ...]:
        """Images and captions. Where the user named their extensions, a plain local shard must have one of each.

        Raises SourceError `missing_member` if it has none; other shards are not looked into.
        """
        if (options.image_keys or options.caption_keys) and not is_url(path) and path.lower().endswith(SUFFIX):
            _require(path, options)
        if not is_url(path) and path.lower().endswith(SUFFIX):
            with suppress(SourceError):  # its own unit fails by it
                _warn_of_other_images(next(self.split(path, options)))
        return self.modalities

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """The samples in order of their first member, after the whole shard has been checked.

        A shard that looks damaged is read once more: what was damaged may have been only the way to here.
        """
        try:
            yield from self._read(unit, on_progress)
        except SourceError as error:
            if error.transient:
                raise
            raise with_samples(error, unit.source) from error

    def _read(self, unit: Unit, on_progress: Moved) -> Iterator[Sample]:
        extensions = extensions_of(unit.options)
        data, archive = _load(unit, on_progress)
        if archive.damage is not None:
            log.warning("shard_read_again", source=unit.source, code=archive.damage.code, why=archive.damage.message)
            damage = archive.damage
            del data, archive
            data, archive = _load_again(unit, on_progress, damage)
        if archive.damage is not None:
            yield from _sound(unit, data, archive, archive.damage, extensions)
            return
        members = archive.members
        entries = group(members, extensions)
        if members and not entries:
            raise SourceError(
                f"{unit.source}: none of its {len(members)} members has a key, as in key.jpg; "
                f"the first is {members[0].name!r}",
                code="shard_no_keys",
                next_step="write the shard with names of the form key.extension",
            )
        images = view_of(data)
        texts = NO_TEXTS not in unit.options
        for ordinal, entry in enumerate(_of_unit(entries, unit)):
            yield _sample(ordinal, entry, data, images, extensions, texts)
        del images
        give_back(data)

    def count_samples(self, unit: Unit, most: int) -> int:
        """From the first bytes of the shard if they tell, else by reading it; 1 for a shard that fails."""
        if unit.samples is not None:
            return min(most, unit.samples)
        try:
            if not keeps_damaged(unit):  # those behind a damage are one failure
                entries = group(parse_first_members(beginning(unit, LOOKED_AT_BYTES)), extensions_of(unit.options))
                if sum(entry.again is None for entry in entries) >= most:
                    return most
            return sum(1 for _ in islice(self.read(unit), most))
        except SourceError as error:
            if error.transient:
                raise
            return 1

    def part(self, unit: Unit, first: int, samples: int | None = None) -> Unit:
        """The unit of some samples of the shard, which is still read and checked as a whole."""
        if samples is None and unit.samples is not None:
            samples = unit.samples - first
        return replace(unit, first=unit.first + first, samples=samples)

    def may_have_metadata(self, unit: Unit) -> bool:
        """True for any shard: only its members tell."""
        return unit.stop > 0

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the `.json` members in the first bytes of the shard."""
        data = beginning(unit, LOOKED_AT_BYTES)
        entries = group(parse_first_members(data), extensions_of(unit.options))
        with unread_counted(unit.source) as unread:
            for entry in _of_unit(entries, unit)[:most]:
                if "json" in entry.parts and entry.again is None:
                    try:
                        yield decode_metadata(_content(entry.parts["json"], data))
                    except SampleError as problem:
                        unread.append(f"{entry.key}: {problem.message}")


def _warn_of_other_images(unit: Unit) -> None:
    """Log where first keys of a shard have members that look like images and are none by webdataset's rule."""
    accepted = extensions_of(unit.options)
    lost = [
        [extension for extension in entry.parts if accepted.is_image(f".{extension}")]
        for entry in group(parse_first_members(beginning(unit, LOOKED_AT_BYTES)), accepted)
        if not entry.parts.keys() & set(accepted.images)
    ]
    if unread := [extension for extensions in lost for extension in extensions]:
        log.warning(
            "images_not_taken",
            path=unit.source,
            members=len(unread),
            keys=sum(map(bool, lost)),
            why=f"a key ends at the first dot, so these members end in {', '.join(sorted(set(unread))[:4])}",
            next="name their ending with --image-key, or write names without further dots",
        )


def _require(path: str, options: ReadOptions) -> None:
    """SourceError `missing_member` if no member has an extension that the user named; a damaged shard passes."""
    with source_errors(path), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                counts = Counter(split_name(member.name)[1] for member in parse_members(data, path))
            except SourceError:
                return
    counts.pop("", None)
    for option, keys in (("--image-key", options.image_keys), ("--caption-key", options.caption_keys)):
        if keys and counts and not counts.keys() & set(keys):
            summary = ", ".join(f"{extension} ({count:,})" for extension, count in counts.most_common(8))
            raise SourceError(
                f"{path}: no member ends in {' or '.join(keys)}; there are {summary}",
                code="missing_member",
                next_step=f"check {option}, or leave the shard out",
            )


def _load(unit: Unit, on_progress: Moved) -> tuple[Memory, Archive]:
    """The shard and its members, as far as it is whole."""
    data = load_unchanged(unit, "shard_changed", on_progress)
    if len(data) != unit.stop:
        raise SourceError(
            f"{unit.source}: {len(data)} bytes could be read of {unit.stop}",
            code="shard_length_mismatch",
            next_step="check the disk or the network share",
            transient=True,
        )
    try:
        return _unpacked(data, unit.source, on_progress)
    except SourceError as damage:
        if damage.code != "source_damaged":
            raise
        return b"", Archive([], 0, copy(damage), None, False)  # a checksum says that something before it is wrong


def unpacked(data: Memory, path: str, on_progress: Moved) -> tuple[Memory, list[TarMember]]:
    """A shard that is in memory, decompressed if it is compressed, and its members, all of them checked.

    Raises SourceError as `unpack` and `walk`, and `too_large` if all of it is more than a reader may hold.
    """
    content, archive = _unpacked(data, path, on_progress)
    if archive.damage is not None:
        raise copy(archive.damage)
    return content, archive.members


def _unpacked(data: Memory, path: str, on_progress: Moved) -> tuple[Memory, Archive]:
    """As `unpacked`, up to where the shard is damaged."""
    most = decoded_bytes() - len(data)
    content, cut = unpack_to_cut(data, path, on_progress, most)
    if content is not data:
        most -= len(content)
    archive = walk(content, path, max(0, most) // MEMBER_BYTES)
    return content, archive if cut is None else archive._replace(damage=cut)


def _load_again(unit: Unit, on_progress: Moved, damage: SourceError) -> tuple[Memory, Archive]:
    """The shard as the storage has it, not this machine's memory.

    Raises SourceError `source_unreadable` if it is damaged otherwise than before: an error of the storage, not of
    the shard.
    """
    forget_cached(unit.source)
    data, archive = _load(unit, on_progress)
    if archive.damage is None or archive.damage.message == damage.message:
        return data, archive
    raise SourceError(
        f"{unit.source}: two reads of it differ: {damage.message}; {archive.damage.message}",
        code="source_unreadable",
        next_step="check the disk or the network share",
        transient=True,
    ) from archive.damage


def _sound(unit: Unit, data: Memory, archive: Archive, damage: SourceError, extensions: Extensions) -> Iterator[Sample]:
    """The samples of a damaged shard that ended before the damage, and a failure for the rest.

    Raises SourceError `damage` if there is none, or none is to be kept.
    """
    entries = _ended(archive, extensions)
    if not keeps_damaged(unit) or not entries:
        raise copy(damage)
    keys = {entry.key for entry in entries}
    digest = SamplesDigest()
    for ordinal, entry in enumerate(_of_unit(entries, unit)):
        sample = _sample(ordinal, entry, data, data, extensions, NO_TEXTS not in unit.options)
        digest.add(sample)
        yield sample
    if digest.samples == unit.samples:
        return  # all of a part of the shard
    start = 0
    for member in archive.members:
        key, _ = split_name(member.name)
        if key and key not in keys:
            break
        start = member.stop + -member.stop % BLOCK
    stop = None if damage.code == "source_truncated" else len(data)
    unread = "an unknown number of" if stop is None else f"{stop - start:,}"
    why = with_samples(damage, unit.source).message
    message = f"{why}; {len(entries):,} samples before byte {start} are kept, {unread} bytes are not read"
    yield rest_of(unit, digest, message, start, stop)


def _of_unit(entries: list[TarSample], unit: Unit) -> list[TarSample]:
    """Those of a unit that is a part of a shard."""
    return entries[unit.first : None if unit.samples is None else unit.first + unit.samples]


def _ended(archive: Archive, extensions: Extensions) -> list[TarSample]:
    """The samples in order, up to the first that may have had members at the damage or behind it.

    A sample has ended where the header of a member of another one follows, as for readers that group neighbours.
    """
    entries = group(archive.members, extensions)
    if archive.ended:
        return entries
    last = next((key for member in reversed(archive.members) if (key := split_name(member.name)[0])), "")
    cut = "" if archive.cut is None else split_name(archive.cut.name)[0]
    open_keys = {cut} if cut else {last}
    return list(takewhile(lambda entry: entry.key not in open_keys, entries))


class TarSample(NamedTuple):
    """A sample before its bytes are looked at. A tuple for the same reason as `TarMember`.

    Attributes:
        key: what its members have in common.
        parts: lower-case extension -> first member with it.
        again: for a repeated member, which becomes a failed sample of its own: that member; else None.
    """

    key: str
    parts: dict[str, TarMember]
    again: TarMember | None


def group(members: list[TarMember], extensions: Extensions = ALL) -> list[TarSample]:
    """The samples that `members` make.

    The first member of a key and extension wins. Every later image is an entry of its own, so that no image goes
    uncounted; so is every later text of a key that has no image. Other repetitions are ignored.
    """
    images, texts = frozenset(extensions.images), frozenset(extensions.texts)
    entries: list[TarSample] = []
    texts_again = False
    by_key: dict[str, TarSample] = {}
    for member in members:
        key, _, extension = member.name.partition(".")
        if not key or not extension or "/" in extension or key[-1] == "/" or key[:2] == "__":  # as few names are
            key, extension = split_name(member.name)
            if not key:
                continue
        else:
            extension = extension.lower()
        entry = by_key.get(key)
        if entry is None:
            if ("/" in key or extension in _SYSTEM_EXTENSIONS) and of_system(member.name):
                continue
            entry = by_key[key] = TarSample(key, {}, None)
            entries.append(entry)
        if extension not in entry.parts:
            entry.parts[extension] = member
        elif extension in images or extension in texts:
            entries.append(TarSample(key, entry.parts, member))
            texts_again = texts_again or extension in texts
    if texts_again:  # whether the key has an image is known only now
        return [entry for entry in entries if not _is_second_caption(entry, extensions)]
    return entries


_NO_SAMPLE = re.compile(r"__[^/.]*__(?:[./]|$)|(?:.*/)?\._", re.DOTALL)
"""webdataset's members about the shard, such as `__index__.json` and `__meta__/...`, and macOS's `._name` of each."""


_SYSTEM_EXTENSIONS = ("db", "ini", "ds_store")
"""Lower-case extensions of the files among `SYSTEM_NAMES`."""


def split_name(name: str) -> tuple[str, str]:
    """Key and lower-case extension by webdataset's rule: they meet at the first dot behind the last slash.

    ("", "") if there is no key: no dot, nothing before it, or a member that is no part of a sample.
    """
    if _NO_SAMPLE.match(name) or of_system(name):
        return "", ""
    stem, dot, extension = name[name.rfind("/") + 1 :].partition(".")
    if not dot:
        return "", ""
    if not stem:
        # "folder/.jpg" has the key "folder/", unless the folder's own name has a dot.
        folder = name[: name.rfind("/") + 1]
        if not folder or "." in folder[:-1].rpartition("/")[2]:
            return "", ""
        return folder, extension.lower()
    return name[: len(name) - len(extension) - 1], extension.lower()


def _is_second_caption(entry: TarSample, extensions: Extensions) -> bool:
    if entry.again is None or split_name(entry.again.name)[1] not in extensions.texts:
        return False
    return any(extension in entry.parts for extension in extensions.images)


def _sample(
    ordinal: int,
    entry: TarSample,
    data: Memory,
    images: Memory | memoryview,
    extensions: Extensions,
    texts: bool,
) -> Sample:
    """The sample of some members. Metadata that cannot be read are no error, nor is a caption without `texts`."""
    key, parts, again = entry
    if again is not None:
        message = f"{again.name} occurs again at byte {again.at}; the first one is used"
        return Sample(ordinal=ordinal, key=key, error=("duplicate_key", message))
    image = text = metadata = error = unread = None
    try:
        for extension in extensions.images:
            if extension in parts:
                image = images[_place(parts[extension])]
                break
        for extension in extensions.texts:
            if extension in parts:
                try:
                    text = decode_file(_content(parts[extension], data))
                except SampleError as problem:
                    if texts or image is None:
                        raise
                    unread = (problem.code, problem.message)
                break
    except SampleError as problem:
        error = (problem.code, problem.message)
    if error is None and "json" in parts:
        try:
            metadata = decode_metadata(_content(parts["json"], data))
        except SampleError as problem:
            unread = (problem.code, problem.message)
    present = tuple(parts) if image is None or text is None else ()
    return Sample(
        ordinal=ordinal,
        key=key,
        image=image,
        text=text,
        metadata=metadata,
        error=error,
        parts=present,
        unread=unread,
    )


def _content(member: TarMember, data: Memory) -> bytes:
    return data[_place(member)]


def _place(member: TarMember) -> slice:
    if not member.regular:
        raise SampleError(
            "unsupported_member", f"{member.name} at byte {member.at} is a link, a device or a sparse file"
        )
    if member.stop - member.start > SAMPLE_MAX_BYTES:
        raise SampleError(
            "too_large",
            f"{member.name} at byte {member.at} has {member.stop - member.start} bytes, more than {SAMPLE_MAX_BYTES}",
        )
    return slice(member.start, member.stop)
