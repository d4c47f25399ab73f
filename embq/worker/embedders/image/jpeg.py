"""JPEG headers."""

from __future__ import annotations

import re
from typing import NamedTuple

SIGNATURE = b"\xff\xd8\xff"

PLAIN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Baseline, extended and progressive frames with Huffman coding, which every decoder reads."""

ONE_SCAN_FRAMES = frozenset({0xC0, 0xC1})
"""Markers of frames with a single scan where the first holds all components: libjpeg refuses a second one."""


_MARKER = re.compile(rb"\xff[^\0\xff]")
"""A marker; as many bytes of 255 as one likes may stand before it, and 255 with a zero behind it is none."""


class Frame(NamedTuple):
    """Header of a JPEG's first frame (ITU-T T.81, B.2.2) and first scan (B.2.3).

    Attributes:
        kind: low byte of its marker: 0xC0 baseline, 0xC2 progressive.
        bits: per channel.
        components: 1 gray, 3 colour, 4 CMYK or YCCK.
        in_first_scan: how many of them the first scan holds; 0 if the data ends before it, or has something
            between two markers.
        scan_at: offset of the first scan's marker; 0 if `in_first_scan` is.
    """

    kind: int
    bits: int
    height: int
    width: int
    components: int
    in_first_scan: int = 0
    scan_at: int = 0

    @property
    def has_one_scan(self) -> bool:
        """Whether every decoder reads one scan of it, or fails."""
        return self.kind in ONE_SCAN_FRAMES and self.in_first_scan == self.components

    @property
    def is_plain(self) -> bool:
        """Whether libjpeg-turbo returns the very pixels that Pillow returns: with four components they differ."""
        return self.kind in PLAIN_FRAMES and self.bits == 8 and self.components in (1, 3)


def frame_of(data: bytes) -> Frame | None:
    """The first frame of a JPEG; None if the data ends before it. What stands between two markers is skipped."""
    frame, is_clean = None, True
    at = 2
    while (match := _MARKER.search(data, at)) and (start := match.start()) + 10 <= len(data):
        # libjpeg goes on to the next marker, where others may not.
        is_clean = is_clean and not data[at:start].strip(b"\xff")
        if frame is not None and not is_clean:
            return frame
        at, marker = start, data[start + 1]
        if marker == 0xDA:
            return None if frame is None else frame._replace(in_first_scan=data[at + 4], scan_at=at)
        if frame is None and 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(data[at + start : at + start + 2], "big") for start in (5, 7))
            frame = Frame(marker, data[at + 4], height, width, data[at + 9])
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return frame
