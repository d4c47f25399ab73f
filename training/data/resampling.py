"""What is particular to epochs of shards drawn with replacement: streams have no end, so an epoch is given one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.errors import InputError
from training.data.batch import Batch, Failure
from training.data.making import Made
from training.data.regroup import whole
from training.data.split import stream_number
from training.data.taken import Taken
from training.data.view import View


def number_of_stream(rank: int, *, first: int, streams: int) -> int:
    """The number of the stream of this loader worker among those of all processes, from which its draws follow."""
    return rank * streams + stream_number(first, streams)


def own_batches(made: Iterable[Made], *, batches: int, taken: Taken, streams: int) -> Iterator[Made]:
    """Of an epoch's batches that are left, those that come from this loader worker: streams give one each in turn.

    Messages without samples do not count.
    """
    stream = stream_number(taken.next_stream, streams)
    left = len(range(taken.batches + (stream - taken.batches) % streams, batches, streams))
    for each in made if left else ():
        yield each
        left -= bool(each)
        if not left:
            return


def fruitful(sent: Iterable[Made], view: View) -> Iterator[Batch]:
    """What loader workers sent, as batches; InputError where one of them found nothing but failures for long."""
    for made in sent:
        if not made:
            raise _fruitless([failure for _, failure in made.failed])
        yield whole(made, view)


def _fruitless(failed: list[Failure]) -> InputError:
    first = failed[0]
    return InputError(
        f"{len(failed)} samples one after the other failed; the first is {first.key or 'all'} of {first.shard}: "
        f"{first.message}",
        code=first.code,
        next_step="check the shards with embq shards verify",
    )
