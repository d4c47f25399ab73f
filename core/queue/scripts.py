"""Lua scripts: who runs one sends its hash, and who may load scripts sees to it that the server knows them.

A server forgets its scripts when it starts. Where users have roles (`core.broker.users`), workers and laptops may run
what is loaded and send no text of their own, so producer and writer load all scripts, and load them again after a
restart.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError

from core.broker.client import user_of
from core.broker.retry_policy import attempts
from core.broker.users import LOADING, role_of
from core.errors import BrokerError
from core.queue.lua import FREEING, SCRIPTS

WAIT_S = 10.0
"""So long does a command that a person waits for give producer and writer to load the scripts."""
LOOK_S = 1.0
"""How often is looked whether the server has forgotten them."""


class Script:
    """One script; it runs whether the server knows it already or not.

    redis-py's own loads it first and then sends the hash again, which fails where the server restarts in between.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()

    def __call__(self, *, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        """Run it; gives the server's answer.

        Where the server does not know it, and our user may not send it: a patient client waits until somebody has
        loaded it, another one for `WAIT_S`. Raises BrokerError after that, and where a stop was asked for.
        """
        try:
            return self._run(keys, args, client)
        except NoScriptError:
            role = role_of(user_of(client))
        if role not in LOADING and role:
            return self._run_once_loaded(keys, args, client)
        if role != "writer":
            # Text and call in one: there is nothing in between in which a server might restart.
            with suppress(NoPermissionError):
                return client.eval(self.text, len(keys), *keys, *args)
        return self._load_and_run(keys, args, client)

    def _run(self, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        return client.evalsha(self.sha, len(keys), *keys, *args)

    def _load_and_run(self, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        for _ in attempts(client, WAIT_S):
            try:
                client.script_load(self.text)
            except NoPermissionError:
                return self._run_once_loaded(keys, args, client)
            with suppress(NoScriptError):  # it restarted just now
                return self._run(keys, args, client)
        raise BrokerError("the broker forgets its scripts as fast as they are loaded", next_step="see the broker's log")

    def _run_once_loaded(self, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        for _ in attempts(client, WAIT_S):
            with suppress(NoScriptError):
                return self._run(keys, args, client)
        raise BrokerError(
            f"the broker does not know embq's scripts, and the user {user_of(client)} may not load them",
            next_step="start `embq producer` or `embq writer` of this version of embq: they do",
        )


def load_scripts(client: redis.Redis) -> dict[str, Script]:
    """All scripts by name, in the form that the server which the client leads to takes."""
    major = int(str(client.info("server")["redis_version"]).split(".")[0])
    return {
        name: Script(("#!lua flags=allow-oom\n" if name in FREEING and major >= 7 else "") + text)
        for name, text in SCRIPTS.items()
    }


class Loader:
    """Has a server know all scripts, again after each restart and each SCRIPT FLUSH.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, client: redis.Redis, scripts: Mapping[str, Script], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._scripts = list(scripts.values())
        self._clock = clock
        self._looked = float("-inf")

    def look(self) -> int:
        """Load what the server does not know, at most once in `LOOK_S`; gives how many.

        A user that may not load scripts loads none: on a server of others, each is then sent as a whole.
        """
        now = self._clock()
        if now - self._looked < LOOK_S:
            return 0
        self._looked = now
        try:
            known = self._client.script_exists(*(script.sha for script in self._scripts))
            missing = [script for script, there in zip(self._scripts, known, strict=True) if not there]
            for script in missing:
                self._client.script_load(script.text)
        except NoPermissionError:
            self._looked = float("inf")
            return 0
        return len(missing)
