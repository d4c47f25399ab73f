"""How good a model is on samples that it was not trained on: each counted once over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.classify.learner import Learner
from training.classify.process_group import Member

if TYPE_CHECKING:
    from training.data.batch import Batch, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A model's performance on the validation set.

    Attributes:
        loss: mean cross entropy.
        top1, top5: part of the samples whose class is the most likely one, or among the five most likely ones.
        samples: that were looked at.
        failed: samples that could not be.
        failures: what failed for this process.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    failed: int
    failures: tuple[Failure, ...]


def measured(
    learner: Learner, member: Member, batches: Iterable[Batch], tell: Callable[[int], None] | None = None
) -> Measured:
    """Measure on this process's batches and add up over all processes, each of which has to call it.

    Args:
        tell: called with the number of samples that this process has measured, after each batch.
    """
    import torch
    from torch.nn.functional import cross_entropy

    learner.model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=learner.device)
    samples = 0
    failures: list[Failure] = []
    with torch.inference_mode():
        for batch in batches:
            failures += batch.failed
            if not len(batch):
                continue
            images, labels = learner.moved(batch.images_on(learner.device), batch.labels)
            with learner.precision.autocast():
                output = learner.model(images)
            nearest = output.float().topk(min(5, output.shape[1]), dim=1).indices == labels[:, None]
            loss = cross_entropy(output.float(), labels, reduction="sum")
            sums += torch.stack([loss.double(), nearest[:, 0].sum().double(), nearest.sum().double()])
            samples += len(batch)
            if tell is not None:
                tell(samples)
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
