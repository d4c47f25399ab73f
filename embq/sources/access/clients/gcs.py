"""fsspec client of gs://: gcsfs over the JSON API, one attempt for each request.

gcsfs retries by itself for half a minute and more, unseen by the watchdog; here `ranged_reads.with_retries` does. Its
class for zonal and hierarchical buckets asks another service about the bucket before each call; this one does not.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from gcsfs.core import GCSFileSystem


class GcsClient(GCSFileSystem):  # type: ignore[misc]
    """gcsfs's own client with other time-outs.

    Args:
        connect_s, answer_s: seconds without a connection, and without an answer.
    """

    def __init__(self, *, connect_s: float, answer_s: float, **options: Any) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=answer_s)
        super().__init__(use_listings_cache=False, requests_timeout=timeout, **options)

    async def _request(self, *args: Any, **options: Any) -> Any:
        try:
            return await GCSFileSystem._request.__wrapped__(self, *args, **options)
        except OSError as error:
            if str(error).startswith("Forbidden"):  # a bare OSError, which could be anything
                raise PermissionError(str(error)) from error
            raise
