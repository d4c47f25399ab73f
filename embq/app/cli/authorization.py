"""Broker permissions that each verb needs, checked before its work begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from embq.app.cli.shared_options import required_url
from embq.core.errors import ConfigError
from embq.core.settings import Settings

if TYPE_CHECKING:
    import redis

NEEDS: Mapping[str, tuple[str, ...]] = {
    "status": ("look",),
    "enqueue": ("look", "hand_over"),
    "enqueue --upload": ("look", "send"),
    "retry": ("look", "hand_over"),
    "pause": ("look", "ask"),
    "resume": ("look", "hand_over", "ask"),
    "cancel": ("look", "ask"),
    "gc": ("look", "sweep"),
    "worker": ("look", "lease", "publish", "report"),
    "producer": ("look", "hint"),
    "writer": ("look", "read", "commit", "acknowledge", "rebuild"),
    "run": ("hand_over", "ask", "hint", "lease", "publish", "read", "commit", "acknowledge", "rebuild"),
    "index": ("look", "conduct", "hint", "read", "commit", "acknowledge", "rebuild"),
}
"""Verb -> names in `embq.core.broker.users.PERMISSIONS`. Loading scripts is not among them: if the server's users
were made by others, scripts may be sent in full instead."""


def require(client: redis.Redis, verb: str, *, instead: str = "") -> None:
    """Raise ConfigError, naming a user that may do it, if the broker's user lacks a permission that the verb needs.

    Args:
        instead: an alternative for the user, as the end of a sentence.
    """
    from embq.core.broker.client import user_of
    from embq.core.broker.users import PERMISSIONS, ROLES, refusals

    needed = [PERMISSIONS[name] for name in NEEDS[verb]]
    refused = refusals(client, needed)
    if not refused:
        return
    able = next(role for role in ROLES if all(role in permission.roles for permission in needed))
    raise ConfigError(
        f"the broker's user {user_of(client) or 'default'} may not {refused[0].what.partition(' (')[0]}, "
        f"which `embq {verb}` needs",
        next_step=f"log in as {able}: EMBQ_BROKER_URL=redis://{able}@HOST:6379, and in EMBQ_BROKER_PASSWORD_FILE "
        f"the file {able}/password of what `embq broker init` has made{instead}",
        code="role",
    )


def authorized_client(
    settings: Settings,
    verb: str,
    *,
    patient: bool = False,
    give_up: Callable[[], bool] = lambda: False,
    instead: str = "",
) -> redis.Redis:
    """A client of the configured broker, after checking the server and the user's permissions.

    Raises ConfigError if no broker is configured, or this one cannot be used; BrokerError if none answers.

    Args:
        patient, give_up: see `embq.core.broker.client.connect`. The first answer is not waited for.
        instead: see `require`.
    """
    from embq.core.broker.bounded import MOST_ANSWER_BYTES, RESULT_BYTES
    from embq.core.broker.client import check, connect, reach

    url = required_url(settings)
    if patient:
        with connect(url, password=settings.broker_password) as first:
            reach(first, url)
    client = connect(
        url,
        password=settings.broker_password,
        patient=patient,
        give_up=give_up,
        answer_bytes=RESULT_BYTES if verb == "writer" else MOST_ANSWER_BYTES,
    )
    check(client, url)
    require(client, verb, instead=instead)
    return client


def configured_broker(settings: Settings) -> redis.Redis | None:
    """A client of the configured broker, checked; None if none is configured."""
    from embq.core.broker.client import check, connect

    if not settings.broker_url:
        return None
    client = connect(settings.broker_url, password=settings.broker_password)
    check(client, settings.broker_url)
    return client
