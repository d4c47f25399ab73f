"""Loss and accuracy of a model on a validation set, each sample counted once over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from embq.core.errors import InputError
from embq.training.classify.learner import Learner
from embq.training.classify.process_group import GroupMember
from embq.training.data.batch import Batch, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Performance on the validation set.

    Attributes:
        loss: mean cross entropy.
        top1, top5: part of the samples whose class is the most likely one, or among the five most likely ones.
        samples: samples that were measured.
        failed: samples that could not be read.
        failures: failures of this process.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    failed: int
    failures: tuple[Failure, ...]

    def check(self, expected: int | None, failures: object) -> None:
        """InputError if nothing was measured, or fewer samples than sizes.json says.

        Args:
            expected: samples of the validation set by sizes.json; None if there is none.
            failures: path of the list of failures.
        """
        if not self.samples:
            raise InputError(
                "no validation sample could be read",
                next_step=f"see {failures} and `embq shards verify`, or leave out --validation",
            )
        if expected is not None and self.samples + self.failed != expected:
            raise InputError(
                f"validation had {self.samples} samples and {self.failed} failures, and sizes.json says {expected}",
                next_step="compare sizes.json with the shards: `embq shards verify`",
                code="epoch_incomplete",
            )


def measured(
    learner: Learner, member: GroupMember, batches: Iterable[Batch], progress: Callable[[int], None] | None = None
) -> Measured:
    """Measure a model on this process's batches, and sum over all processes. Collective.

    Args:
        progress: called after each batch with the samples of this process so far.
    """
    learner.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=learner.device)
    samples = 0
    failures: list[Failure] = []
    with torch.inference_mode():
        for batch in batches:
            failures += batch.failed
            if not len(batch):
                continue
            images, labels = learner.to_device(batch.images_on(learner.device), batch.labels)
            with learner.precision.autocast():
                output = learner.model(images)
            nearest = output.float().topk(min(5, output.shape[1]), dim=1).indices == labels[:, None]
            loss = cross_entropy(output.float(), labels, reduction="sum")
            sums += torch.stack([loss.double(), nearest[:, 0].sum().double(), nearest.sum().double()])
            samples += len(batch)
            if progress is not None:
                progress(samples)
    learner.model.train()
    failed = sum(failure.samples for failure in failures)
    loss_sum, right, near, total, lost = member.totals([*sums.tolist(), samples, failed])
    counted = max(1.0, total)
    return Measured(
        loss=loss_sum / counted,
        top1=right / counted,
        top5=near / counted,
        samples=int(total),
        failed=int(lost),
        failures=tuple(failures),
    )
