"""The fetch stage: a hint becomes a lease, and a lease becomes work for the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import redis

from core.errors import ConfigError, InputError
from core.models import ModelConfig
from core.queue.hints import Hint
from core.queue.ledger import Ledger, new_token
from core.queue.runs import RunRecord, registered
from core.queue.scripts import load_scripts
from core.service.log import Events
from core.units import Unit
from worker.claim.input_locality import InputLocality
from worker.claim.lease import LeasedUnit, Leases
from worker.stages.pipeline import POLL_S, Pipeline

RECORDS_MAX_AGE_S = 5.0


def check_dims(record: RunRecord, dims: Mapping[str, int]) -> None:
    """Raise InputError where the rows of a run cannot be made of a model's vectors.

    Args:
        dims: output of the model -> how many numbers its vectors have.
    """
    for output in record.model.outputs:
        record.rows.check(output.spec, dims[output.name])
    for image, text in record.model.compared.values() if record.rows.similarity else ():
        if dims[image] != dims[text]:
            raise InputError(
                f"--similarity: {record.model.spec} gives images {dims[image]} numbers and texts {dims[text]}",
                next_step="leave out --similarity",
                code="wrong_dimension",
            )


class Claimer:
    """Claims the units that hints name.

    Args:
        client: a patient client.
        bulk: one that waits longer for an answer, because it sends results.
        model: the loaded model's config; hints of other models are dropped.
        fingerprint: the loaded model's; a run that began with another one is refused.
        dims: output -> how many numbers its vectors have.
        refuse: takes a run whose rows cannot be made of such vectors.
        only: the one run that is served, or "".
        sight: knows which inputs are on this machine.
        claimed: told each unit that was claimed.
        seconds_of: how long a unit takes here, if known.
    """

    def __init__(
        self,
        client: redis.Redis,
        bulk: redis.Redis,
        pipeline: Pipeline,
        leases: Leases,
        *,
        name: str,
        model: ModelConfig,
        fingerprint: str,
        dims: Mapping[str, int],
        refuse: Callable[[str, InputError], None],
        lease_s: float,
        stopped: Callable[[], bool],
        only: str,
        sight: InputLocality,
        claimed: Callable[[Unit], None],
        seconds_of: Callable[[Unit], float | None],
    ) -> None:
        self.client = client
        self.bulk = bulk
        self.pipeline = pipeline
        self.leases = leases
        self.name = name
        self.model = model
        self.fingerprint = fingerprint
        self.dims = dims
        self.refuse = refuse
        self.lease_s = lease_s
        self.stopped = stopped
        self.only = only
        self.sight = sight
        self.claimed = claimed
        self.seconds_of = seconds_of
        self.log = Events("worker")
        self._scripts = load_scripts(client)
        self._records: dict[str, RunRecord] = {}
        self._read_at = 0.0

    def take(self, hints: Sequence[Hint]) -> None:
        """Claim the units of hints and submit them; a claim that is not granted needs nothing more.

        Raises ConfigError where the run was begun with other weights, preprocessing or precision.
        """
        suspects = []
        for hint in hints:
            work = self._claim(hint)
            if work is None:
                continue
            self.leases.add(work)
            if work.suspect:
                suspects.append(work)
            else:
                self.pipeline.submit(work)
        # A unit that ended a worker before runs alone, so that it cannot take others with it a second time.
        while suspects:
            self._wait_until_held_at_most(len(suspects))
            self.pipeline.submit(suspects.pop())
            self._wait_until_held_at_most(len(suspects))

    def serves(self) -> list[str]:
        """The runs that were announced and may be served with the loaded model."""
        self._look()
        return [run for run, record in self._records.items() if record.model == self.model and self.only in ("", run)]

    def _claim(self, hint: Hint) -> LeasedUnit | None:
        record = self._record(hint.run)
        if record is None or record.model != self.model:
            self.log.info("hint_not_ours", run=hint.run, u=hint.u)
            return None
        try:
            check_dims(record, self.dims)
        except InputError as error:
            self.refuse(record.run, error)
            return None
        ledger = Ledger(self.client, hint.run, scripts=self._scripts, bulk=self.bulk)
        token = new_token(hint.gen, self.name)
        claim = ledger.claim(
            hint.u,
            token,
            lease_s=self.lease_s,
            fingerprint=self.fingerprint,
            idle=not self.leases.snapshot(),
            unit_s=self.seconds_of(hint.unit) or 0.0,
        )
        if claim.word == "fingerprint":
            raise ConfigError(
                f"run {hint.run} was begun with other weights or settings of {self.model.spec} (fingerprint "
                f"{claim.detail}) than this worker has ({self.fingerprint})",
                next_step="use the same model files and library versions on every machine, or start a new run",
                code="wrong_model",
            )
        if not claim.granted:
            self.log.info("claim_refused", run=hint.run, u=hint.u, why=claim.word)
            return None
        # Only after the claim, so that it is hinted again at once.
        if self.sight.leaves(hint.run, hint.unit, self.model.spec):
            ledger.release(hint.u, token)
            return None
        self.claimed(hint.unit)
        return LeasedUnit(hint, record, ledger, token, attempts=claim.attempts, poison=claim.poison)

    def _wait_until_held_at_most(self, count: int) -> None:
        while self.pipeline.running and not self.stopped():
            if self.leases.wait_until_at_most(count, timeout_s=POLL_S):
                return

    def _record(self, run: str) -> RunRecord | None:
        self._look(run)
        return self._records.get(run)

    def _look(self, run: str = "") -> None:
        if (run and run not in self._records) or time.monotonic() - self._read_at > RECORDS_MAX_AGE_S:
            self._records = registered(self.client)
            self._read_at = time.monotonic()
