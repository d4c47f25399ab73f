"""Redaction of secrets, and escaping of control characters, in texts for people.

Texts come from data: each takes time in proportion to its length, which `cut` bounds.
"""

from __future__ import annotations

import re

HIDDEN = "****"

MAX_TEXT = 1 << 16
"""Characters of a message, or of one value of a log."""

_LONGEST_SECRET = 4096
"""Characters of a token; signed session tokens of object stores have up to 2,000."""

_USER = re.compile(r"://[^:@/\s]*+(?=:)")
_PASSWORD = re.compile(r":[^\s\"]*+")
"""It ends at the last "@" in this, because a password that was not quoted may hold any character."""

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
    text = _without_passwords(text)
    text = _LONG_USER.sub(rf"\1{HIDDEN}@", text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", text)
    text = _NAMED.sub(rf"\1{HIDDEN}", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _HUGGING_FACE.sub(f"hf_{HIDDEN}", text)


def cut(text: str, most: int = MAX_TEXT) -> str:
    """The beginning of a text from data, of at most `most` characters and a note; for `masked`.

    It ends before whatever may be the first part of a secret, which `masked` would not recognise.
    """
    if len(text) <= most:
        return text
    end = most
    if not text[most - 1].isspace():
        word = most - len(text[:most].rsplit(maxsplit=1)[-1])
        end = max(word, most - _LONGEST_SECRET)
        if (url := text.find("://", word, end)) >= 0:
            end = url
    return f"{text[:end]}… ({len(text) - end:,} more characters)"


def _without_passwords(text: str) -> str:
    """The text with the passwords of its URLs hidden.

    Each stretch without spaces is searched once: one expression for user and password searches it from every "://".
    """
    if "@" not in text:
        return text
    pieces: list[str] = []
    at = stretch = 0
    last = -1
    for user in _USER.finditer(text):
        start = user.end()
        if start >= stretch and (password := _PASSWORD.match(text, start)):
            stretch, last = password.end(), text.rfind("@", start, password.end())
        if at <= user.start() and last > start:
            pieces += text[at:start], ":", HIDDEN
            at = last
    return "".join([*pieces, text[at:]])


def printable(text: str) -> str:
    """`text` with control characters and what no terminal can show as escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )
