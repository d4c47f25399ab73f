"""Uploads to S3 that were begun and never completed, as a writer leaves them that is killed while it sends a part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from core.storage.objects import ObjectPath, key_of, seconds_of


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that was begun: what it was to become, its id, and when it was begun by the store's clock."""

    path: ObjectPath
    upload: str
    began: float

    def abort(self) -> None:
        """Let the store forget it; one that is gone already is no error."""
        bucket, _, key = key_of(str(self.path)).partition("/")
        try:
            self.path.ask(
                lambda store, _: store.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=self.upload)
            )
        except FileNotFoundError:
            return


def unfinished(folder: ObjectPath) -> list[Unfinished]:
    """Uploads below a name that were begun and not completed; only S3 keeps them (and bills for them)."""
    if not str(folder).startswith("s3:"):
        return []
    bucket, _, key = key_of(str(folder)).partition("/")
    found: list[Unfinished] = []
    marks: dict[str, str] = {}
    while True:
        request = {"Bucket": bucket, "Prefix": f"{key}/" if key else "", **marks}
        said = folder.ask(partial(_uploads, request))
        found += [
            Unfinished(ObjectPath(f"s3://{bucket}/{one['Key']}"), one["UploadId"], seconds_of(one.get("Initiated")))
            for one in said.get("Uploads") or ()
        ]
        if not said.get("IsTruncated"):
            return found
        marks = {"KeyMarker": said["NextKeyMarker"], "UploadIdMarker": said["NextUploadIdMarker"]}


def _uploads(request: dict[str, str], store: Any, _: str) -> dict[str, Any]:
    found: dict[str, Any] = store.call_s3("list_multipart_uploads", **request)
    return found
