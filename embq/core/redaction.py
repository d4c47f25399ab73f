"""Redaction of secrets, and escaping of control characters, in texts for people."""

from __future__ import annotations

import re

HIDDEN = "****"

_USER_INFO = re.compile(r"(://[^:@/\s]*):[^\s\"]*@")
"""Up to the last "@", because a password that was not quoted may hold any character."""

_LONG_USER = re.compile(r"(://)[^:@/\s]{20,}@")
"""A token in place of a user; no user of ours has so long a name."""

_SIGNED = re.compile(
    r"([?&](?:password|x-amz-(?:signature|security-token|credential)|x-goog-(?:signature|credential)|signature|sig"
    r"|policy|key-pair-id|awsaccesskeyid|(?:access_?|auth_?|id_?)?token|api_?key|secret)=)[^&\s\"'<>)]*",
    re.IGNORECASE,
)
"""Secrets in the query of a URL: passwords for redis-py, signatures for object stores and their CDNs."""

_NAMED = re.compile(
    r"(?<![\w-])((?:[a-z0-9]+[_-])*"
    r"(?:[a-z]{0,6}password|passwd|secret_access_key|session_token|hf_token|client_secret|private_key|api[_-]?key)"
    r"[\"']?\s*[=:]\s*)(?:\"[^\"\n]*\"?|'[^'\n]*'?|[^\s\"',;&}]+)",
    re.IGNORECASE,
)
"""A name that says so, and its value, which is taken to its closing quote."""

_AUTHORIZATION = re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_HUGGING_FACE = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
"""Their tokens have 34 letters and digits; the functions of their library have an underscore before that."""


def masked(text: str) -> str:
    """The text without its secrets: passwords in URLs, what is signed in a query, bearer and Hugging Face tokens.

    A masked text stays as it is. For single values and lines: mask values before they are written as JSON.
    """
    text = _USER_INFO.sub(rf"\1:{HIDDEN}@", text)
    text = _LONG_USER.sub(rf"\1{HIDDEN}@", text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", text)
    text = _NAMED.sub(rf"\1{HIDDEN}", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _HUGGING_FACE.sub(f"hf_{HIDDEN}", text)


def printable(text: str) -> str:
    """`text` with control characters and what no terminal can show as escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
