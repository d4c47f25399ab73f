"""Inputs that hold a secret: a password, or the signature by which whoever has the URL may read.

Inputs that are handed to services travel through the broker, and stand in the run's files. Each machine has its own
credentials for the storage instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.errors import UsageError
from core.redaction import masked


def refuse_secrets(inputs: Iterable[str]) -> None:
    """UsageError for the first input that holds a secret, which the message does not repeat."""
    for text in inputs:
        scheme, is_url, rest = text.partition("://")
        if not is_url:
            continue
        place, _, query = rest.partition("?")
        netloc, slash, path = place.partition("/")
        user, _, host = netloc.rpartition("@")
        if ":" in user:
            what = "a password"
        elif masked(f"?{query}") != f"?{query}":
            what = "a signature or a token"
        else:
            continue
        raise UsageError(
            f"the input {scheme}://{host}{slash}{path} has {what} in its URL, which would travel through the broker "
            "and stand in the run's files",
            next_step="name it without, and give each worker credentials of its own, as the storage's tools take them "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS); or embed it on this machine alone: embq run",
            code="secret_in_url",
        )
