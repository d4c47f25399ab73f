"""Map `without-quotes`: leaves out the lines that a text quotes."""

from __future__ import annotations

from dataclasses import replace

from embq.plugins import Sample, SampleError


def without_quotes(sample: Sample) -> Sample:
    """The sample without lines that begin with ">"; a failure `only_quotes` where none is left."""
    kept = [line for line in (sample.text or "").splitlines() if not line.startswith(">")]
    if not any(line.strip() for line in kept):
        raise SampleError("only_quotes", "the text holds nothing but quoted lines")
    return replace(sample, text="\n".join(kept))
