"""Kind of input `mbox`: mailboxes, a mail per sample; its key is the Message-ID, its text the subject and the text."""

from __future__ import annotations

import email
import email.policy
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from embq.plugins import (
    SAMPLE_MAX_BYTES,
    InputError,
    Moved,
    ReadOptions,
    Sample,
    Source,
    SourceError,
    Unit,
    base_name,
    open_current,
    open_unchanged,
    unwatched,
)

START = b"From "
"""A line that begins a mail."""


class MailboxSource(Source):
    """See `embq.plugins.Source`. A unit is a slice of the file, from one start of a mail to another."""

    kind = "mbox"
    modalities: tuple[str, ...] = ("text",)
    suffixes = (".mbox",)

    def split(self, path: str, options: ReadOptions) -> Iterator[Unit]:
        """Units of `unit_samples` mails, from one pass over the file."""
        unit = Unit(kind=self.kind, source=path)
        try:
            with open_current(unit, "source_changed", unwatched) as (version, file):
                starts: list[int] = []
                offset = 0
                while line := file.readline(SAMPLE_MAX_BYTES):
                    if line.startswith(START):
                        starts.append(offset)
                    offset += len(line)
        except SourceError as error:
            raise InputError(error.message, next_step=error.next_step, code=error.code) from error
        if not starts:
            raise InputError(f"{path}: holds no mail", code="empty_input", next_step="leave it out")
        for first in range(0, len(starts), options.unit_samples):
            mails = starts[first : first + options.unit_samples]
            stop = starts[first + len(mails)] if first + len(mails) < len(starts) else offset
            yield replace(unit, start=mails[0], stop=stop, first=first, samples=len(mails), etag=version)

    def read(self, unit: Unit, on_progress: Moved = unwatched) -> Iterator[Sample]:
        """A sample per mail."""
        with open_unchanged(unit, "source_changed", on_progress) as file:
            file.seek(unit.start)
            mail: list[bytes] = []
            ordinal = -1
            while file.tell() < unit.stop and (line := file.readline(SAMPLE_MAX_BYTES)):
                if line.startswith(START):
                    if mail:
                        yield _sample(unit, ordinal, mail)
                    mail, ordinal = [], ordinal + 1
                else:
                    mail.append(line)
            yield _sample(unit, ordinal, mail)

    def may_have_metadata(self, unit: Unit) -> bool:
        """True: each mail has some."""
        return True

    def first_metadata(self, unit: Unit, most: int) -> Iterator[str]:
        """From the first mails; by it a run finds its columns."""
        return (sample.metadata for sample in islice(self.read(unit), most) if sample.metadata is not None)


def _sample(unit: Unit, ordinal: int, lines: list[bytes]) -> Sample:
    key = f"{base_name(unit.source)}:{unit.first + ordinal + 1}"
    data = b"".join(lines)
    if len(data) > SAMPLE_MAX_BYTES:
        return Sample(ordinal=ordinal, key=key, error=("too_large", f"the mail has {len(data):,} bytes"))
    try:
        mail = email.message_from_bytes(data, policy=email.policy.default)
        body = mail.get_body(("plain",))
        text = f"{mail.get('Subject', '')}\n\n{body.get_content() if body is not None else ''}".strip()
        metadata = json.dumps({"from": str(mail.get("From", "")), "date": str(mail.get("Date", ""))})
        return Sample(ordinal=ordinal, key=str(mail.get("Message-ID", key)).strip(), text=text, metadata=metadata)
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # of the parser, for a mail that is none
        return Sample(ordinal=ordinal, key=key, error=("bad_mail", f"the mail cannot be parsed: {error}"))
