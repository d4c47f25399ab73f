"""Which results may become rows: a result is checked against the manifest and the run before it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from core.errors import OutputError
from core.layout import Layout
from core.live import failed_keys, record_failures
from core.manifest import Manifest
from core.protocol import VERSION
from core.result_stream import Entry
from core.results import Result, decode_result, failure_batch, row_schema, unlike, vector_widths
from core.retries import Retry
from core.run_info import RunInfo
from core.units import Failure
from writer.hashing import read_hashed
from writer.staging import staged_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A result that will be committed.

    Attributes:
        entry: id of its stream entry.
        u: unit index.
        unit_id: unit id, checked against the manifest.
        token: attempt that made it.
        rows: rows without id and unit_id.
        failures: its failures.
        quarantined: code of the failure that stands for the whole unit, or "".
        staged: name of its staging file, or "".
        bytes: its size.
        truncated: texts of which only the beginning was embedded.
        tokens: what its samples cost the device; 0 where the worker does not say.
        retry: what it does again, where it is a retry.
    """

    entry: str
    u: int
    unit_id: str
    token: str
    rows: pa.Table
    failures: pa.Table
    quarantined: str
    staged: str
    bytes: int
    truncated: int = 0
    tokens: int = 0
    retry: Retry | None = None


class Rejected(Exception):
    """A result that cannot be used; its unit runs again. `code` and the message go into the unit's account."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Acceptor:
    """Checks results of one run.

    Attributes:
        fingerprint: the run's; fixed by its first result.
        widths: lengths of its vectors by column; fixed by the first result that has rows.

    Args:
        info: the run. It says which columns a result has, and of which types.
    """

    def __init__(
        self, layout: Layout, manifest: Manifest, info: RunInfo, *, fingerprint: str, widths: Mapping[str, int]
    ) -> None:
        self.layout = layout
        self.manifest = manifest
        self.fingerprint = fingerprint
        self.widths = widths
        outputs = info.model.output_names
        lengths = dict.fromkeys(outputs, 8)  # which only a loaded model tells
        compared = tuple(info.model.compared) if info.rows.similarity else ()
        chunked = info.model.chunking is not None
        self._schema = row_schema(outputs, lengths, info.rows, compared=compared, chunked=chunked)

    def accept(self, entry: Entry) -> Accepted:
        """The result in a stream entry; Rejected where it cannot be trusted."""
        try:
            return self._accept(entry)
        except (KeyError, ValueError) as error:
            raise Rejected("bad_result", f"its fields cannot be read: {error}") from error

    def _accept(self, entry: Entry) -> Accepted:
        fields = {name: value for name, value in entry.fields.items() if name != "data"}
        text = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
        u, token = int(text["u"]), text["token"]
        unit_id = self.manifest.unit_id(u)
        retry = self.manifest.unit(u).retry if self.manifest.is_retry(u) else None
        if token == "quarantine":
            return self._given_up(entry, text, unit_id, retry)
        self._check_origin(u, unit_id, text)
        result = self._decode(entry.fields, text)
        self._check_counts(result, u, text, None if retry is None or not retry.only else retry.ordinals)
        widths = self._check_schema(result)
        self.fingerprint, self.widths = text["fingerprint"], widths
        failures = self._by_sample(result.failures, retry)
        whole_unit = failures["ordinal"].null_count
        return Accepted(
            entry=entry.id,
            u=u,
            unit_id=unit_id,
            token=token,
            rows=result.rows,
            failures=failures,
            quarantined=str(failures["code"][0]) if whole_unit else "",
            staged=text.get("ref", ""),
            bytes=int(text["bytes"]),
            truncated=int(text.get("truncated", "0")),
            tokens=max(0, int(text.get("tokens", "0"))),
            retry=retry,
        )

    def _given_up(self, entry: Entry, text: Mapping[str, str], unit_id: str, retry: Retry | None) -> Accepted:
        """The failure that the broker has published for a unit after its last attempt."""
        whole = Failure(
            ordinal=None,
            key="",
            code=text["code"] or "crash",
            message=text["message"],
            attempt=int(text["attempts"]) + (0 if retry is None else retry.attempts),
        )
        failures = pa.Table.from_batches([failure_batch([whole])])
        return Accepted(
            entry=entry.id,
            u=int(text["u"]),
            unit_id=unit_id,
            token=text["token"],
            rows=pa.table({}),
            failures=self._by_sample(failures, retry),
            quarantined=whole.code if retry is None or not retry.only else "",
            staged="",
            bytes=0,
            retry=retry,
        )

    def _check_origin(self, u: int, unit_id: str, text: Mapping[str, str]) -> None:
        """The result is of this version, this unit and the run's model."""
        if text.get("v") != str(VERSION):
            version = text.get("v", "none")
            raise Rejected("wrong_version", f"the result is of protocol version {version}, this writer's is {VERSION}")
        if text["unit_id"] != unit_id:
            raise Rejected("wrong_unit", f"unit {u} is {unit_id}, the result is of {text['unit_id']}")
        if self.fingerprint and text["fingerprint"] != self.fingerprint:
            raise Rejected("wrong_model", f"model fingerprint {text['fingerprint']}, the run has {self.fingerprint}")

    def _by_sample(self, failures: pa.Table, retry: Retry | None) -> pa.Table:
        """The failures; one that stands for all samples of a retry as one of each, so that each key keeps its own."""
        if retry is None or not retry.only or not failures["ordinal"].null_count:
            return failures
        (whole,) = failures.to_pylist()
        keys = failed_keys(record_failures(self.layout.root, retry.record), retry)
        each = [
            Failure(
                ordinal=ordinal,
                key=keys[ordinal],
                code=whole["code"],
                message=whole["message"],
                attempt=whole["attempt"],
            )
            for ordinal in retry.ordinals
        ]
        return pa.Table.from_batches([failure_batch(each)])

    def _decode(self, fields: Mapping[str, bytes], text: Mapping[str, str]) -> Result:
        data: bytes | memoryview
        if ref := text.get("ref"):
            path = staged_path(self.layout, ref)
            if path is None:
                raise Rejected("bad_result", f"{ref!r} is no staging file")
            try:
                data, digest = read_hashed(path)
            except OSError as error:
                raise Rejected("lost_result", f"staging file {ref} is gone: {error.strerror}") from error
            # Workers do not fsync staging files (a lost one is only computed again), so the hash decides.
            if digest != text["sha256"]:
                raise Rejected("lost_result", f"staging file {ref} is damaged")
        else:
            data = fields["data"]
        try:
            return decode_result(data)
        except OutputError as error:
            raise Rejected(error.code, error.message) from error

    def _check_schema(self, result: Result) -> Mapping[str, int]:
        """The columns are those of the run; the lengths of the run's vectors, which these rows may be first to tell."""
        if not result.rows.num_rows:
            return self.widths
        if differing := unlike(result.rows.schema, self._schema):
            raise Rejected("wrong_schema", f"its columns are not those of the run: {', '.join(differing)}")
        widths = vector_widths(result.rows.schema)
        if self.widths and widths != self.widths:
            raise Rejected("wrong_schema", f"its vectors have {_said(widths)} numbers, the run's {_said(self.widths)}")
        return widths

    def _check_counts(self, result: Result, u: int, text: Mapping[str, str], wanted: Sequence[int] | None) -> None:
        """Each ordinal exactly once, as a row or as a failure, and as many as were announced.

        Args:
            wanted: the ordinals of a retry; None where they are all from 0 on.
        """
        rows, failures = result.rows.num_rows, result.failures.num_rows
        if (rows, failures) != (int(text["rows"]), int(text["failures"])):
            raise Rejected("wrong_count", f"unit {u} has {rows} rows and {failures} failures, not what it announced")
        if result.failures["ordinal"].null_count:
            if rows or failures != 1:
                raise Rejected("wrong_count", f"unit {u} failed as a whole and has {rows} rows")
            return
        if "chunk" in result.rows.column_names:
            _check_chunks(result, u, wanted)
            return
        seen = np.concatenate([result.rows["ordinal"].to_numpy(), result.failures["ordinal"].to_numpy()])
        if not np.array_equal(np.sort(seen), np.arange(rows + failures) if wanted is None else wanted):
            raise Rejected("wrong_count", f"unit {u}: its ordinals are not each there once")


def _said(widths: Mapping[str, int]) -> str:
    return ", ".join(str(width) for width in widths.values())


def _check_chunks(result: Result, u: int, wanted: Sequence[int] | None) -> None:
    """Each text once: as a failure, or as its chunks, each of which is a row or a failure.

    Where a text has rows, they say how many chunks it has; a failure of one of them has its key.
    """
    rows, failures = result.rows, result.failures
    ordinals, counts = rows["ordinal"].to_numpy(), rows["chunks"].to_numpy()
    failed = failures["ordinal"].to_numpy()
    texts, first, chunks = np.unique(ordinals, return_index=True, return_counts=True)
    every = np.union1d(texts, failed)
    if not np.array_equal(every, np.arange(len(every)) if wanted is None else wanted):
        raise Rejected("wrong_count", f"unit {u}: a text has neither rows nor a failure")
    pairs = np.stack([ordinals, rows["chunk"].to_numpy()])
    if np.unique(pairs, axis=1).shape[1] != len(ordinals) or (pairs[1] < 0).any() or (pairs[1] >= counts).any():
        raise Rejected("wrong_count", f"unit {u}: a chunk is there twice, or has no number of its text")
    if not np.array_equal(counts, counts[first][np.searchsorted(texts, ordinals)]):
        raise Rejected("wrong_count", f"unit {u}: the rows of a text disagree on how many chunks it has")
    of_texts = np.bincount(failed, minlength=len(every))[texts] if len(failed) else np.zeros(len(texts), dtype=int)
    if not np.array_equal(chunks + of_texts, counts[first]):
        raise Rejected("wrong_count", f"unit {u}: a text has not as many rows and failures as chunks")
    if len(set(zip(failed.tolist(), failures["key"].to_pylist(), strict=True))) != len(failed):
        raise Rejected("wrong_count", f"unit {u}: a failure is there twice")
