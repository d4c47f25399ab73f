"""Running and loading Lua scripts: a script is run by its hash, and loaded by users that have the right to.

A server forgets its scripts when it restarts. Where users have roles (`embq.core.broker.users`), workers and laptops
may run loaded scripts only, so producer and writer load all scripts, and load them again after a restart.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from embq.core.broker.client import user_of
from embq.core.broker.retry_policy import attempts
from embq.core.broker.users import LOADING, role_of
from embq.core.errors import BrokerError, LimitError
from embq.core.queue.lua import FREEING, SCRIPTS
from embq.core.queue.lua.prelude import REFUSED

WAIT_S = 10.0
"""Time for which an impatient client waits for producer or writer to load the scripts."""
LOOK_S = 1.0
"""Time between two checks that the server still knows them."""


class Script:
    """A script, run whether the server knows it already or not.

    redis-py's own class loads it first and then sends the hash again, which fails on a restart in between.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()

    def __call__(self, *, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        """Run it; returns the server's answer.

        Where the server does not know it and the user may not send it, a patient client waits until it is loaded,
        another one for `WAIT_S`. Raises BrokerError after that, and if a stop was requested, and LimitError if the
        arguments exceed the bounds of the script.
        """
        try:
            return self._run_known_or_load(keys, args, client)
        except ResponseError as error:
            if not str(error).startswith(f"{REFUSED} "):
                raise
            raise LimitError(
                f"the broker's script refused a call: {str(error).removeprefix(f'{REFUSED} ')}",
                next_step="nothing of it was done; report it as a bug of embq, with this message",
            ) from error

    def _run_known_or_load(self, keys: Sequence[str], args: Sequence[Any], client: redis.Redis) -> Any:
        try:
            return self._run(keys, args, client)
        except NoScriptError:
            role = role_of(user_of(client))
        if role not in LOADING and role:
            return self._run_once_loaded(keys, args, client)
        if role != "writer":
            # Text and call in one command, so no restart can come in between.
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
            with suppress(NoScriptError):  # the server restarted just now
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
    """All scripts by name, in the form for the version of the client's server."""
    major = int(str(client.info("server")["redis_version"]).split(".")[0])
    return {
        name: Script(("#!lua flags=allow-oom\n" if name in FREEING and major >= 7 else "") + text)
        for name, text in SCRIPTS.items()
    }


class Loader:
    """Loads all scripts into a server, again after each restart and each SCRIPT FLUSH.

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

    def load_missing(self) -> int:
        """Load what the server does not know, at most once in `LOOK_S`; returns how many.

        A user without the right to load scripts loads none; each is then sent in full.
        """
        now = self._clock()
        if now - self._looked < LOOK_S:
            return 0
        self._looked = now
        try:
            loaded = self._client.script_exists(*(script.sha for script in self._scripts))
            missing = [script for script, is_loaded in zip(self._scripts, loaded, strict=True) if not is_loaded]
            for script in missing:
                self._client.script_load(script.text)
        except NoPermissionError:
            self._looked = float("inf")
            return 0
        return len(missing)
