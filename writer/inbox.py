"""The results that the broker delivers to the writer of one run, in an order that loses none."""

from __future__ import annotations

from core.queue.result_stream import Entry, ResultStream

READ_BYTES = 64 * 1024 * 1024
"""Payload aimed at per read of the stream; bounds what the writer holds beside its buffer."""


class Inbox:
    """Results of one run as they come. Those that were delivered before and not acknowledged come first."""

    def __init__(self, stream: ResultStream) -> None:
        self._stream = stream
        self._count = 16
        self._delivered_after: str | None = "0"

    def read(self) -> list[Entry]:
        """The next results; none where nothing is there now."""
        # Nobody but a hostile worker makes the stream so large that what is read at once could be too much to hold.
        count = 1 if self._stream.is_overfull() else self._count
        if self._delivered_after is not None:
            # What was delivered to us before a restart comes first, to its end.
            entries = self._stream.read(self._delivered_after, count=count, block_ms=None)
            self._delivered_after = entries[-1].id if entries else None
            if entries:
                return entries
        entries = self._stream.read(">", count=count, block_ms=None)
        size = sum(len(entry.fields.get("data", b"")) for entry in entries)
        if size > READ_BYTES:
            self._count = max(1, self._count // 2)
        elif size < READ_BYTES // 8 and len(entries) == self._count:
            self._count = min(512, self._count * 2)
        return entries

    def read_again(self) -> None:
        """Begin once more with what was delivered and is not acknowledged."""
        self._delivered_after = "0"

    def start_empty(self) -> None:
        """The stream was made anew: nothing of it was delivered."""
        self._delivered_after = None

    def has_lost(self, held: int) -> bool:
        """Whether more was delivered than the `held` results that wait for a commit: a reply was lost on its way."""
        return self._delivered_after is None and self._stream.unacknowledged() > held
