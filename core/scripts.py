"""A Lua script that runs wherever it is sent, whether the server knows it already or not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import NoScriptError


class Script:
    """Sent by its hash; as a whole where the server does not know it.

    redis-py's own loads it first and then sends the hash again, which fails where the server restarts in between.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()

    def __call__(self, *, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        """Run it; gives the server's answer."""
        try:
            return client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.eval(self.text, len(keys), *keys, *args)
