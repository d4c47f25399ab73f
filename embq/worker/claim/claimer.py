"""Claims units: receives hints, asks for the leases on their units, and decides how many to hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Set

import redis

from embq.core.errors import ConfigError, InputError
from embq.core.models import ModelConfig
from embq.core.queue import hints
from embq.core.queue.hints import Hint
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.runs import RunRecord, active
from embq.core.queue.scripts import load_scripts
from embq.core.service.log import Events
from embq.sources.unit_reader import fetchable
from embq.worker.claim.claim_policy import ClaimPolicy
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.claim.rq_worker import HintReceiver
from embq.worker.context import WorkerContext
from embq.worker.embedders.base import Embedder
from embq.worker.meter.meter import Meter

RECORDS_MAX_AGE_S = 5.0


def check_dims(record: RunRecord, dims: Mapping[str, int]) -> None:
    """Raise InputError if the rows of a run cannot be made of a model's vectors.

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
    """Claims units of the runs that use one loaded model. For one thread.

    Args:
        client: a patient client.
        bulk: one that waits longer for an answer, because it sends results.
        model: the loaded model's config; hints of other models are dropped.
        full_runs: those that have no room for results now; their units are hinted again when they have.
    """

    def __init__(
        self,
        context: WorkerContext,
        client: redis.Redis,
        bulk: redis.Redis,
        model: ModelConfig,
        embedder: Embedder,
        leases: Leases,
        meter: Meter,
        full_runs: Callable[[], Set[str]],
    ) -> None:
        self.context = context
        self.full_runs = full_runs
        self.client = client
        self.bulk = bulk
        self.model = model
        self.embedder = embedder
        self.leases = leases
        self.meter = meter
        self.policy = ClaimPolicy(
            client,
            leases,
            meter.throughput,
            model,
            name=context.options.name,
            run=context.options.run,
            runs=self._served,
            prefetch=context.options.prefetch,
            embedder=embedder,
        )
        self.receiver = HintReceiver(
            hints.hint_queue(client, model.queue_key),
            name=context.options.name,
            read=Hint.from_job,
        )
        self.log = Events("worker")
        self._scripts = load_scripts(client)
        self._registered: dict[str, RunRecord] = {}
        self._read_at = 0.0

    def next_units(self) -> Iterator[LeasedUnit]:
        """Claim units, each as it is asked for; none if enough are in hand, or where no hint comes for a moment.

        Raises ConfigError if all there is to serve was begun with other weights, preprocessing or precision.
        """
        self.receiver.beat()
        room = 0 if self.context.locality.rests else self.policy.room()
        self.meter.times.enough(self.policy.enough)
        if not room:
            time.sleep(self.policy.rest_s)
            return
        with self.receiver.receive(
            room,
            lambda hints: self.policy.fits([hint.unit for hint in hints]),
            run=self.context.options.run,
        ) as received:
            full = self.full_runs()
            for hint in received:
                if hint.run in full:
                    Ledger(self.client, hint.run, scripts=self._scripts).hint_again(hint.u)
                elif (unit := self._claim(hint)) is not None:
                    yield unit

    def _claim(self, hint: Hint) -> LeasedUnit | None:
        """The unit of a hint, held from now on; None if it is not granted."""
        record = self._records(hint.run).get(hint.run)
        if record is None or record.model != self.model:
            self.log.info("hint_not_ours", run=hint.run, u=hint.u)
            return None
        scheduler = self.context.scheduler
        try:
            check_dims(record, self.embedder.dims)
        except InputError as error:
            scheduler.refuse_run(record.run, error)
            return None
        ledger = Ledger(self.client, hint.run, scripts=self._scripts, bulk=self.bulk)
        if scheduler.refuses(hint.run):
            ledger.hint_again(hint.u)  # for another machine
            return None
        token = new_token(hint.gen, self.context.options.name)
        claim = ledger.claim(
            hint.u,
            token,
            lease_s=self.context.settings.lease_s,
            fingerprint=self.embedder.fingerprint,
            idle=not self.leases.at_work(),
            unit_s=self.meter.throughput.seconds_of(hint.unit) or 0.0,
        )
        if claim.word == "fingerprint":
            other_model = ConfigError(
                f"run {hint.run} was begun with other weights or settings of {self.model.spec} (fingerprint "
                f"{claim.detail}) than this worker has ({self.embedder.fingerprint})",
                next_step="use the same model files and library versions on every machine, or start a new run",
                code="wrong_model",
            )
            scheduler.refuse_run(record.run, other_model)
            if scheduler.refuses_all():
                raise other_model
            return None
        if not claim.granted:
            self.log.info("claim_refused", run=hint.run, u=hint.u, why=claim.word)
            return None
        scheduler.served(record.run)
        unit = LeasedUnit(hint, record, ledger, token, attempts=claim.attempts, poison=claim.poison)
        # Only after the claim, so that it is hinted again at once.
        if self.context.locality.leaves(hint.run, hint.unit, self.model.spec):
            unit.release()
            return None
        self.policy.claimed(hint.unit, from_far=fetchable(hint.unit, self.context.settings.roots))
        self.leases.add(unit)
        return unit

    def _served(self) -> list[str]:
        """The runs that were announced and may be served with the loaded model."""
        only = self.context.options.run
        return [run for run, record in self._records().items() if record.model == self.model and only in ("", run)]

    def _records(self, run: str = "") -> dict[str, RunRecord]:
        """The runs that are not over, read anew if they are old or lack `run`."""
        if (run and run not in self._registered) or time.monotonic() - self._read_at > RECORDS_MAX_AGE_S:
            self._registered = active(self.client)
            self._read_at = time.monotonic()
        return self._registered
