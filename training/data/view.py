"""What one process of a training takes of the shards, and what it makes of a picture."""

from __future__ import annotations

from dataclasses import dataclass

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One process's part of a training.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        loader_workers: processes that read and decode for this one; 0 has it do so itself.
        batch_size: samples of a batch.
        image_size: side of the square pictures that the model takes, in pixels.
        seed: of the whole training; order, crops and flips follow from it.
        shuffle_buffer: encoded samples that each loader worker holds in memory and draws from; 0 leaves the order of
            the shards.
        classes: labels are 0 to `classes` - 1, others fail; None takes any that are not negative.
        mean, std: per channel, of values from 0 to 1; a picture is normalised with them.
        pin_memory: whether pixels come in page-locked memory, from which a GPU copies them while it computes.
    """

    rank: int = 0
    world: int = 1
    loader_workers: int = 0
    batch_size: int
    image_size: int
    seed: int = 0
    shuffle_buffer: int = 1000
    classes: int | None = None
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    pin_memory: bool = False

    @property
    def streams(self) -> int:
        """How many streams of samples are read side by side for this process."""
        return max(1, self.loader_workers)
