"""Load the models of `--embeddings`, in this process, as a worker process loads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from embq.app.embedding.in_process import keep_memory
from embq.core.errors import ConfigError, UsageError
from embq.core.extras import missing
from embq.core.models import ModelConfig, ModelSpec
from embq.core.process.limits import cores
from embq.core.service.log import Events
from embq.core.settings import Settings, change_environment
from embq.producer.model_args import choose_precision, split_name
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.device.capability import check_device
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.registry import load
from embq.worker.supervisor.devices import find_devices, isolated_device
from embq.worker.supervisor.machine import described

CPU_PASS_TOKENS = 384
"""Most padded tokens of a pass on a CPU. A worker has 1,024, cut from thousands of sorted texts. Of the few that wait
here most of such a pass would be padding: 41 % with 40 short texts, 15 % with 256 tokens, which take 4 % longer for
each (all-MiniLM-L6-v2 on two Zen 4 cores)."""

_log = Events("serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model on its device.

    Attributes:
        name: by which requests name it.
        config: of a run over texts.
    """

    name: str
    config: ModelConfig
    embedder: Embedder


def load_detokenizer(name: str) -> Callable[[Sequence[int]], str]:
    """The function from ids of a tokenizer of tiktoken to their text.

    Raises ConfigError if the package or the tokenizer's data is not here, UsageError for an unknown name.
    """
    try:
        import tiktoken
    except ModuleNotFoundError as error:
        step = "pip install tiktoken, or leave the option out"
        raise missing("tiktoken", "--token-ids needs the package tiktoken", next_step=step) from error
    if name not in (names := tiktoken.list_encoding_names()):
        raise UsageError(f"tiktoken has no tokenizer {name!r}", next_step=f"name one of {', '.join(names)}")
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # those of requests among them
        raise ConfigError(
            f"the data of tiktoken's tokenizer {name} is neither here nor to be had: {type(error).__name__}",
            next_step="set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has kept it on a machine with the internet",
        ) from error

    def text_of(ids: Sequence[int]) -> str:
        return str(encoding.decode(list(ids), errors="strict"))

    return text_of


def load_models(specs: Sequence[str], *, precision: str, device: str, settings: Settings) -> list[Loaded]:
    """The models of `[NAME=]SPEC` for texts on one device; a model without a name is called as its spec is written.

    Args:
        precision: one of `embq.core.models.PRECISIONS`; "auto" for that which `embq run` chooses for the device.
        device: "cpu", "cuda:N"; "auto" for the first CUDA device, or the CPU if there is none.

    Raises UsageError for two models of one name or several devices, and what finding the device or loading raises.
    """
    named: dict[str, ModelSpec] = {}
    for text in specs:
        name, spec = split_name(text)
        name = spec if name is None else name
        if not name or name in named:
            raise UsageError(
                f"--embeddings {text!r}: there is another {name!r}" if name else f"--embeddings {text!r} has no name",
                next_step=f"give each model a name of its own: --embeddings NAME={spec}",
            )
        named[name] = ModelSpec.given(spec)
    visible = settings.cuda_visible
    devices = find_devices(device, visible)
    if len(devices) > 1 and device != "auto":
        raise UsageError(
            f"--devices {device} names {len(devices)} devices, and a server has one",
            next_step="name one, such as cuda:0; start a server for each, and a proxy before them",
        )
    if precision == "auto":
        precision = choose_precision(list(described(devices[:1], visible).values())).precision
    place, shown = isolated_device(devices[0], visible)
    # Before torch is imported, which reads them then; as of a worker process.
    change_environment(
        {"OMP_NUM_THREADS": settings.omp_threads or str(cores()), "TOKENIZERS_PARALLELISM": "false", **shown}
    )
    if place == "cpu":
        keep_memory()
    check_device(place)
    loaded = []
    for name, model in named.items():
        config = ModelConfig(spec=str(model), modalities=("text",), precision=precision)
        embedder = load(config, place)
        warm_up(embedder, config.modalities)
        tune(embedder, config, device=place, compile_s=settings.compile_s)
        if place == "cpu" and embedder.token_budget and not model.param("tokens", ""):
            embedder.token_budget = min(embedder.token_budget, CPU_PASS_TOKENS)
        _log.info("embeddings_loaded", name=name, model=model, device=devices[0], precision=precision)
        loaded.append(Loaded(name=name, config=config, embedder=embedder))
    return loaded
