"""Whether the broker's user whom we are logged in as may do what a verb does: asked before any work is begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.errors import ConfigError

if TYPE_CHECKING:
    import redis


def require(client: redis.Redis, verb: str, *, instead: str = "") -> None:
    """ConfigError, naming the user and the one that is needed, where the broker refuses our user what a verb needs.

    Args:
        instead: what else the user can do, as the end of a sentence.
    """
    from core.broker.client import user_of
    from core.broker.users import NEEDS, PERMISSIONS, ROLES, refusals

    needed = [PERMISSIONS[name] for name in NEEDS[verb]]
    refused = refusals(client, needed)
    if not refused:
        return
    able = next(role for role in ROLES if all(role in one.roles for one in needed))
    raise ConfigError(
        f"the broker's user {user_of(client) or 'default'} may not {refused[0].what.partition(' (')[0]}, "
        f"which `embq {verb}` needs",
        next_step=f"log in as {able}: EMBQ_BROKER_URL=redis://{able}@HOST:6379, and in EMBQ_BROKER_PASSWORD_FILE "
        f"the file {able}/password of what `embq broker init` has made{instead}",
        code="role",
    )
