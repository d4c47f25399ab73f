"""The flags of the webdataset ImageNet kit's commands, for the files beside this one.

Flags with a counterpart are renamed, flags without effect are noted, and others are refused with an alternative.
embq's own flags may be among them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from embq.app.cli.entry_point import run, show_error
from embq.core.errors import EmbqError, Exit, InputError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

TRAIN, VALIDATION = "imagenet-train-{000000..001281}.tar", "imagenet-val-{000000..000049}.tar"
"""The shards that the kit makes of ImageNet."""
BUCKET = "./shards/"
EPOCHS, BATCH, LOADERS = 300, 32, 4
"""The kit's defaults, where they are others than ours."""

OF_NO_EFFECT = {
    "loginterval": "--log-every N says after how many steps the log gets a line",
    "cache_dir": "shards are read where they are; copy them to a local disk beforehand",
    "nval": "all samples of the validation shards are measured on, the last partial batch too",
    "backend": "GPUs talk by NCCL, cores by gloo",
    "showopen": "OUT/log.jsonl and the failures name each shard",
}
"""Flags whose absence changes nothing that is trained, with what stands in their place."""

REFUSED = {
    "amplevel": "apex is not used: --precision bf16, or fp16",
    "apexddp": "apex is not used: torch's own DistributedDataParallel is",
    "distributed": "the kit did not use it either: run-local takes every GPU of the machine, and `embq train classify "
    "--hosts a,b` those of others",
}
BUCKETS = ("gs:", "ais:", "pipe:")


_TEXTS = {
    "bucket": (BUCKET, "Folder or URL of the shards."),
    "shards": (None, "Shards to train on, below the bucket.  [the kit's names]"),
    "valshards": (None, "Shards to measure on.  [the kit's names, where they are there]"),
    "mname": ("resnet18", "Architecture of torchvision."),
    "device": (None, "cuda or cpu.  [cuda]"),
    "loginterval": (None, "Of no effect."),
    "cache-dir": (None, "Of no effect."),
    "backend": (None, "Of no effect: nccl on GPUs, gloo on the CPU."),
    "amplevel": ("", "Refused: --precision."),
    "distributed": ("", "Refused."),
}
_NUMBERS = {
    "batchsize": (BATCH, "Samples of a process in one step."),
    "nepochs": (EPOCHS, "How often to go through all samples."),
    "workers": (LOADERS, "Loader workers of each process."),
    "ntrain": (None, "Samples of an epoch.  [what sizes.json says]"),
    "nval": (None, "Of no effect."),
}
_SWITCHES = {
    "splitshards": "Exact epochs: each sample once.",
    "onelog": "Of no effect: only the first process logs.",
    "showopen": "Of no effect.",
    "apexddp": "Refused.",
    "verbose": "Of no effect.",
}


def _options(function: F) -> F:
    """The flags of the kit's `train` and `raytrain`."""
    decorators: list[Callable[[F], F]] = []
    for name, (default, line) in _TEXTS.items():
        decorators.append(click.option(f"--{name}", default=default, show_default=bool(default), help=line))
    for name, (number, line) in _NUMBERS.items():
        decorators.append(click.option(f"--{name}", default=number, type=int, show_default=bool(number), help=line))
    for name, line in _SWITCHES.items():
        decorators.append(click.option(f"--{name}/--no-{name}", default=False, help=line))
    rest = "[FLAGS OF embq train classify]"
    decorators.append(click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar=rest))
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


_SETTINGS = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


@click.command("run-local", context_settings=_SETTINGS)
@_options
def local_command(**flags: Any) -> list[str]:
    """Train on all GPUs of this machine, as `run-local` of the webdataset ImageNet kit did on one."""
    return translated(flags, [])


@click.command("run-ray", context_settings=_SETTINGS)
@_options
@click.option("--wsize", default=0, metavar="N", help="Workers; 0 and -1 for every GPU of the cluster.")
@click.option(
    "--ray-address", default="auto", show_default=True, metavar="HOST:PORT", help="The head of the cluster, see embq."
)
def ray_command(wsize: int, ray_address: str, **flags: Any) -> list[str]:
    """Train on a Ray cluster that is there already, as `run-ray` of the webdataset ImageNet kit did.

    Start it with `ray start --head --port=26379`, since 6379 is Redis' port too, and add machines with
    `ray start --address=HOST:26379`. All of them have to see the shards: `embq shards serve` and --bucket http://HOST:8080/
    """
    if flags["device"] and flags["device"].startswith("cuda:"):
        flags["device"] = "cuda"  # the kit's default: the first of those that Ray shows a worker
    return translated(flags, [f"--ray-address={ray_address}", *([f"--num-devices={wsize}"] if wsize > 0 else [])])


def translated(flags: dict[str, Any], where: Sequence[str]) -> list[str]:
    """Arguments of `embq`; notes go to stderr.

    Args:
        flags: flags of the kit -> their values.
        where: what only one of the two commands says.

    Raises UsageError for a flag that cannot be meant here, InputError where `--ntrain` contradicts the shards.
    """
    for name, why in REFUSED.items():
        if flags[name]:
            raise UsageError(f"--{name}: embq has no such flag", next_step=why)
    further = list(flags["further"])
    train, validation = _shards(flags)
    arguments = ["train", "classify", train, *([f"--validation={validation}"] if validation else [])]
    arguments += [f"--model={_architecture(flags['mname'])}", f"--epochs={flags['nepochs']}"]
    arguments += [f"--batch-size={flags['batchsize']}", f"--workers={flags['workers']}"]
    arguments += ["--splitshards"] if flags["splitshards"] else []
    arguments += _device(flags["device"])
    arguments += _epoch(flags["ntrain"], train, exact=flags["splitshards"])
    if not any(one.split("=")[0] in ("--output", "-o") for one in further):
        arguments.append(f"--output=./{flags['mname']}")
        _note(f"checkpoints and the log are in ./{flags['mname']}; --output names another folder")
    for name in _without_effect(flags):
        _note(f"--{name.replace('_', '-')} is of no effect: {OF_NO_EFFECT[name]}")
    return [*arguments, *where, *further]


def _shards(flags: dict[str, Any]) -> tuple[str, str]:
    """(training shards, validation shards or "")."""
    bucket = flags["bucket"]
    if bucket.startswith(BUCKETS):
        raise UsageError(
            f"--bucket {bucket}: shards are read from folders and over http(s)",
            next_step="mount or copy them, or let a server give them by http",
        )
    if "://" in bucket:
        train, validation = flags["shards"] or TRAIN, flags["valshards"] or VALIDATION
        return _below(bucket, train), _below(bucket, validation)
    # A kit with fewer shards than ImageNet's has them all the same under these names.
    train, validation = _below(bucket, flags["shards"] or "imagenet-train-*.tar"), flags["valshards"]
    if validation:
        return train, _below(bucket, validation)
    folder = os.path.dirname(_below(bucket, "x"))
    there = os.path.isdir(folder) and any(name.startswith("imagenet-val-") for name in os.listdir(folder))
    if not there:
        _note(f"nothing is measured between epochs: {folder} has no imagenet-val-*.tar; --valshards names others")
    return train, _below(bucket, "imagenet-val-*.tar") if there else ""


def _below(bucket: str, name: str) -> str:
    return bucket.replace("{}", name) if "{}" in bucket else bucket + name


def _architecture(name: str) -> str:
    if name == "trivial":
        raise UsageError(
            "--mname trivial: the kit's single layer is no architecture of torchvision",
            next_step="a small one, such as --mname resnet18, or --model timm:NAME with `embq train classify`",
        )
    return f"torchvision:{name}"


def _device(device: str | None) -> list[str]:
    if device is None or device in ("cuda", "cpu"):
        return [f"--device={device}"] if device else []
    kind, _, number = device.partition(":")
    if kind == "cuda" and number.isdecimal():
        raise UsageError(
            f"--device {device}: a training takes the GPUs that it sees",
            next_step=f"show it this one only: CUDA_VISIBLE_DEVICES={number} and --device cuda",
        )
    raise UsageError(f"--device {device}: this is neither cuda nor cpu", next_step="--device cuda, or --device cpu")


def _epoch(asked: int | None, train: str, *, exact: bool) -> list[str]:
    """The length of an epoch; an exact one has that of the shards."""
    if asked is None:
        return []
    if not exact:
        return [f"--epoch-samples={asked}"]
    from embq.training.shards.shard_set import open_shards

    there = open_shards(train).samples
    if there is not None and there != asked:
        raise InputError(
            f"--ntrain {asked:,} and --splitshards: the shards have {there:,} samples, by sizes.json, and an exact "
            "epoch has each of them once",
            next_step="leave --ntrain out, or --splitshards",
        )
    return []


def _without_effect(flags: dict[str, Any]) -> Iterator[str]:
    """Flags that were given and change nothing."""
    expected = "gloo" if flags["device"] == "cpu" else "nccl"
    for name in OF_NO_EFFECT:
        if flags[name] and not (name == "backend" and flags[name] == expected):
            yield name


def _note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def called(command: click.Command, arguments: Sequence[str]) -> int:
    """Translate a command line and run it; returns the exit status."""
    try:
        meant = command.main(list(arguments), standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except EmbqError as error:
        show_error(error)
        return error.exit_code
    return run(meant) if isinstance(meant, list) else Exit.DONE
