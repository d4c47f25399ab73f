"""int8 on CPUs: the trunk of a text model in OpenVINO, quantised by NNCF when it is loaded.

Weights have one range for each output channel. Activations have fixed ranges, measured on `CALIBRATION_TEXTS`, after
NNCF has moved their outliers into the weights (SmoothQuant, arXiv 2211.10438). The product behind each attention stays
in fp32, and so does what is done with the last hidden states (pooling, further layers, length 1), which torch computes.

Of 5,000 docstrings through MiniLM the smallest cosine with fp32 is 0.9935 in this way, and 0.983 where the products
behind the attentions are quantised as well, a twelfth of the work. Of 200 of them it was 0.985 with ranges that ONNX
Runtime 1.31 finds for each batch (channels apart, attention fused), 0.885 with those of torch 2.15
(`quantize_dynamic`): a few activations are far larger than all others, which leaves the others too few steps.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import rich
import torch
from torch.nn.functional import cosine_similarity
from transformers.modeling_outputs import BaseModelOutput

from embq.core.errors import ModelError, SampleError
from embq.core.models import ModelConfig
from embq.core.units import content_hash
from embq.worker.embedders.loading import first_line
from embq.worker.embedders.text.tokens import Tokens

Batch = Mapping[str, torch.Tensor]
"""int64 tensors of shape (texts, tokens): `input_ids`, `attention_mask` and, if they are not 0, `token_type_ids`."""

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs of a converted trunk, in this order."""

GROUP = 4
"""Texts that are measured at once."""

LEAST_COSINE = 0.9
"""Between what a trunk returns in int8 and in fp32, its states averaged over each calibration text. MiniLM has 0.99; a
trunk that was converted wrongly, or whose activations have no common range, is far below."""


SMOOTHING = 0.75
"""SmoothQuant's alpha, from 0 to 1: the share of outliers that NNCF moves into the weights. Of 5,000 docstrings
through MiniLM the smallest cosine is 0.9848 with 0.6; of 250 it is lower with NNCF's own 0.95 as well."""

IN_FP32 = "behind attention"
"""Layers that are not quantised, as the fingerprint names them."""
MOVES = ("Reshape", "Transpose")
"""Operations that leave every number as it is."""

TALKATIVE = ("nncf", "transformers", "torch.utils.cpp_extension")
"""Loggers that warn of what does not concern a user here."""


class Int8Trunk(torch.nn.Module):
    """In the place of a transformers encoder: its last hidden states, float32 of shape (texts, tokens, dim).

    Attributes:
        config: the encoder's own.
    """

    def __init__(self, compiled: Any, config: Any, takes: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        self._compiled = compiled
        self._mine = threading.local()
        self._takes = takes

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutput:
        """ModelError if more is asked for than the last hidden states of token ids."""
        if unknown := [name for name, value in options.items() if name != "return_dict" and value is not None]:
            raise ModelError(
                f"in int8 a model's trunk gives its last hidden states of token ids only, not with {unknown[0]}",
                next_step="use fp32 or bf16",
            )
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        given = dict(zip(INPUTS, (input_ids, attention_mask, types), strict=True))
        if not hasattr(self._mine, "request"):  # passes may be computed beside each other
            self._mine.request = self._compiled.create_infer_request()
        request = self._mine.request
        request.infer([given[name].contiguous().numpy() for name in self._takes], share_inputs=True)
        # The runtime writes the next batch to the same place.
        return BaseModelOutput(last_hidden_state=torch.from_numpy(request.get_output_tensor(0).data.copy()))


def int8_content(config: ModelConfig) -> dict[str, Any]:
    """Settings of a quantised trunk, for the fingerprint; empty in other precisions."""
    if config.identified_as.precision != "int8":
        return {}
    _runtime()
    versions = {name: importlib.metadata.version(name) for name in ("openvino", "nncf")}
    return {"int8": {**versions, "calibration": content_hash([CALIBRATION_TEXTS, GROUP, SMOOTHING, IN_FP32])}}


def int8_trunk(trunk: Any, tokens: Tokens, prompt: str, model: str) -> Int8Trunk:
    """`trunk` quantised, with as many threads as torch has.

    Args:
        trunk: a transformers encoder in fp32 on the CPU; it is not changed.
        tokens: the model's tokeniser.
        prompt: what comes before each text.
        model: its spec, for the error.

    Raises ModelError if it cannot be converted, or is too far from fp32 afterwards; ImportError without a runtime.
    """
    rows = [
        row for row in tokens.rows([prompt + text for text in CALIBRATION_TEXTS]) if not isinstance(row, SampleError)
    ]
    rows.sort(key=lambda row: len(row["input_ids"]))
    groups = [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)]
    batches = [tokens.padded(group, torch.device("cpu")) for group in groups]
    takes = [name for name in INPUTS if name in inspect.signature(trunk.forward).parameters]
    # A plug-in of OpenVINO 2026.4 gives the thread that makes it a stack for signals, and frees that stack with itself,
    # also if the thread has it still: the next signal with a handler ends the process. A thread that ends before its
    # plug-ins has no use for it. The options are read here, because torch has a number of threads for each thread.
    with ThreadPoolExecutor(1) as short_lived:
        compiled = short_lived.submit(_quantised, trunk, takes, batches, model, _runtime_options()).result()
    result = Int8Trunk(compiled, trunk.config, takes)
    check_cosines(trunk, result, batches, model)
    return result


def _quantised(
    trunk: Any, takes: Sequence[str], batches: Sequence[Batch], model: str, options: Mapping[str, Any]
) -> Any:
    """The compiled model of OpenVINO, with `takes` as its inputs and the last hidden states as its output."""
    openvino, nncf = _runtime()
    feeds = [tuple(batch.get(name, torch.zeros_like(batch["input_ids"])) for name in takes) for batch in batches]
    try:
        with _quietly(), torch.inference_mode(False), torch.no_grad():
            states = _LastHiddenStates(trunk, takes)
            traced = torch.jit.trace(states, feeds[-1], check_trace=False)  # type: ignore[no-untyped-call]
            converted = openvino.convert_model(traced, example_input=feeds[-1], input=[[-1, -1] for _ in takes])
            quantised = nncf.quantize(
                converted,
                nncf.Dataset([[tensor.numpy() for tensor in feed] for feed in feeds]),
                preset=nncf.QuantizationPreset.MIXED,
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(feeds),
                ignored_scope=nncf.IgnoredScope(names=products_behind_attention(converted)),
                advanced_parameters=nncf.AdvancedQuantizationParameters(
                    smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=SMOOTHING),
                    # Takes a fourth of the time, and the vectors are no nearer to those in fp32.
                    disable_bias_correction=True,
                ),
            )
            return openvino.Core().compile_model(quantised, "CPU", options)
    except _refusals() as error:
        raise ModelError(
            f"{model}: its trunk cannot be converted to int8: {first_line(error)}", next_step="use fp32 or bf16"
        ) from error


def products_behind_attention(converted: Any) -> list[str]:
    """Names of the matrix products in a model of OpenVINO that take what an attention returns.

    None if attention is not one operation there, as in T5, which has a bias of its own.
    """
    names = []
    reached = [op for op in converted.get_ops() if op.get_type_name() == "ScaledDotProductAttention"]
    while reached:
        for reader in reached.pop().output(0).get_target_inputs():
            op = reader.get_node()
            if op.get_type_name() == "MatMul":
                names.append(op.get_friendly_name())
            elif op.get_type_name() in MOVES:
                reached.append(op)
    return names


def _refusals() -> tuple[type[Exception], ...]:
    """Exceptions of tracer, converter and quantiser for a trunk that they refuse: there is no common tree."""
    from nncf import InternalError, UnsupportedModelError, ValidationError
    from openvino.frontend import GeneralFailure, NotImplementedFailure, OpConversionFailure

    plain = (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError)
    own = (InternalError, UnsupportedModelError, ValidationError)
    return (*plain, *own, GeneralFailure, NotImplementedFailure, OpConversionFailure)


def _runtime() -> tuple[Any, Any]:
    """(openvino, nncf). Both would report their use to their maker through a package that they do without."""
    modules = cast(dict[str, Any], sys.modules)
    modules["openvino_telemetry"] = None
    with _quietly():
        import nncf
        import openvino
    return openvino, nncf


def _runtime_options() -> dict[str, Any]:
    return {
        # A pass for each core, see `embq.worker.embedders.device.network.ParallelPasses`.
        "NUM_STREAMS": torch.get_num_threads(),
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        # Workers that each pin their threads to the first cores would share these, and leave the others idle.
        "ENABLE_CPU_PINNING": False,
        # The rest is not computed in bf16 where a CPU has that: one fingerprint has the same vectors everywhere.
        "INFERENCE_PRECISION_HINT": "f32",
    }


class _LastHiddenStates(torch.nn.Module):
    """A trunk as a function of tensors alone."""

    def __init__(self, trunk: Any, takes: Sequence[str]) -> None:
        super().__init__()
        self._trunk = trunk
        self._takes = takes

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self._takes, inputs, strict=True))
        return cast(torch.Tensor, self._trunk(**given, return_dict=True).last_hidden_state)


def check_cosines(trunk: Any, quantised: Int8Trunk, batches: Sequence[Batch], model: str) -> None:
    """Raise ModelError if the cosine of a text's vectors in int8 and in fp32 is below `LEAST_COSINE`, or is none."""
    least = 1.0
    with torch.inference_mode():
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            exact, rounded = ((module(**batch).last_hidden_state * mask).sum(1) for module in (trunk, quantised))
            # Not `min` of both, which loses a NaN.
            cosine = float(cosine_similarity(exact, rounded).min())
            least = cosine if not cosine >= least else least
    if not least >= LEAST_COSINE:
        raise ModelError(
            f"{model}: in int8 its vectors are too far from those in fp32 (cosine {least:.3f})",
            next_step="use fp32 or bf16",
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without NNCF's bars, and without what it and the tracer warn of: `check_cosines` looks at what came out."""
    console, loggers = rich.get_console(), [logging.getLogger(name) for name in TALKATIVE]
    was_quiet, levels = console.quiet, [logger.level for logger in loggers]
    console.quiet = True
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        console.quiet = was_quiet
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


CALIBRATION_TEXTS = (
    "Hello",
    "1",
    "?!",
    "red running shoes, size 42",
    "What is the capital of Australia?",
    "how to remove a stripped screw without a drill",
    "A dog jumps over a fallen tree at the edge of a lake.",
    "IMG_20190704_183012.jpg",
    "Quarterly results: revenue rose 12.4 % to $3.81 billion, net income fell to $214 million, or $0.52 per share.",
    "Return the absolute value of the argument.",
    "Open the file and return a stream. Raise OSError upon failure. The mode is an optional string that says how the "
    "file is opened; it defaults to 'r', which means open for reading in text mode. Other common values are 'w' for "
    "writing (truncating the file if it already exists), 'x' for creating and writing to a new file, and 'a' for "
    "appending, which on some Unix systems means that all writes append to the end of the file regardless of the "
    "current seek position. In text mode, if encoding is not specified the encoding used is platform dependent.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / "
    "len(values)",
    "SELECT customer_id, COUNT(*) AS orders FROM orders WHERE created_at >= '2021-01-01' GROUP BY customer_id;",
    "Usage: backup [OPTIONS] SOURCE TARGET\n\n  -r, --recursive   descend into folders\n  -n, --dry-run     say what "
    "would be done\n      --exclude X   leave out what matches X, may be given several times\n  -h, --help        show "
    "this text",
    "Traceback (most recent call last): ValueError: could not convert string to float: 'n/a'",
    "https://example.org/docs/v2/index.html?lang=en&page=17#install",
    '{"id": 7311, "name": "Lamp, desk", "price": {"amount": 24.9, "currency": "EUR"}, "tags": ["home", "light"]}',
    "Preheat the oven to 180 degrees. Whisk the eggs with the sugar until pale, fold in the flour and the melted "
    "butter, and pour the batter into a greased tin. Bake for 35 minutes, or until a skewer comes out clean. Let it "
    "cool before you take it out, and dust it with icing sugar.",
    "The French Revolution was a period of political and societal change in France which began with the Estates "
    "General of 1789 and ended with the Coup of 18 Brumaire in 1799. Many of its ideas are considered fundamental "
    "principles of liberal democracy, while its values and institutions remain central to modern political discourse.",
    "Photosynthesis converts light energy into chemical energy. In plants, algae and cyanobacteria it uses water and "
    "carbon dioxide, and releases oxygen. The light reactions take place in the thylakoid membranes, where chlorophyll "
    "absorbs photons and an electron transport chain produces ATP and NADPH; these drive the Calvin cycle in the "
    "stroma, which fixes carbon dioxide into sugars. The rate depends on light intensity, the concentration of carbon "
    "dioxide, temperature and water. Plants of dry places have found other ways to take in carbon dioxide: some of "
    "them open their stomata only at night, and store it as an acid until the morning comes.",
    "The patient, a 54-year-old woman with a history of type 2 diabetes and hypertension, presented with acute chest "
    "pain radiating to the left arm. ECG showed ST elevation in leads II, III and aVF. Troponin was 3.2 ng/mL.",
    "Subject to the terms and conditions of this License, each Contributor hereby grants to You a perpetual, "
    "worldwide, non-exclusive, no-charge, royalty-free, irrevocable copyright license to reproduce, prepare derivative "
    "works of, publicly display, publicly perform, sublicense, and distribute the Work.",
    "We study the convergence of stochastic gradient descent for non-convex functions whose gradients are only Hölder "
    "continuous, and show a rate of O(n^{-1/3}) under an assumption on the variance that is weaker than those of "
    "earlier work. Experiments on three data sets agree with the theory.",
    "lol no way!!! u really did that?? 😂😂 ok see u tmrw then, bring snacks",
    "Great product, arrived on time. The zip broke after two weeks though, and nobody answers my e-mails. Two stars.",
    "Dear Ms. Novak, thank you for your letter of 3 March. We regret that your order was delayed, and have asked our "
    "carrier for an explanation. You will have the parts by Friday at the latest. Yours sincerely, J. Peters",
    "BREAKING: Magnitude 6.8 earthquake strikes off the coast; tsunami warning issued, no casualties reported so far",
    "It was late in the evening when the old man came down from the hill. The road was empty, the shops were shut, and "
    "a thin rain had begun to fall, so that the lamps along the harbour had rings around them. He stopped at the third "
    "door and listened. Somebody inside was playing the same four bars on a piano, over and over, always going wrong "
    "at the same note. He smiled, took off his hat, shook the water from it, and knocked twice. The music broke off. "
    "For a while nothing happened; then there were steps, and a chain, and a voice that he had not heard for thirty "
    "years asked who was there. He had thought about his answer all the way across the sea, on the ship and on the "
    "train and in the rooms of cheap hotels, and had learnt it by heart, and now he could not remember a word of it.",
    "Chapter 4. Installation .......... 31\n4.1 Requirements .......... 31\n4.2 From packages .......... 32\n4.3 From "
    "source .......... 35\n4.4 Trouble .......... 38",
    "x = (-b ± √(b² − 4ac)) / 2a, where a ≠ 0",
    "GATTACAGATTACACCGGTTAACCGGTTTTAACG",
    "Die Bundesregierung hat am Mittwoch beschlossen, den Ausbau der Schienenwege zwischen den großen Städten mit "
    "weiteren drei Milliarden Euro zu fördern.",
    "Le chat dort sur le canapé pendant que la pluie tombe sur les toits de la vieille ville.",
    "¿Dónde puedo comprar un billete de tren para mañana por la mañana?",
    "Москва является крупнейшим по численности населения городом России и одним из крупнейших городов Европы.",
    "机器学习是人工智能的一个分支,它使计算机能够从数据中学习。",
    "東京は日本の首都であり、世界で最も人口の多い都市圏の一つです。",
    "القاهرة هي عاصمة مصر وأكبر مدنها من حيث عدد السكان.",
    "भारत दुनिया का सबसे अधिक जनसंख्या वाला देश है।",
)
"""The ranges of activations are measured on them, on every worker alike.

They are of many kinds and lengths, because a range that no text reached here is cut off later. To change one of them,
or their order, as they are measured in groups, is to change the vectors of every int8 model, and so its fingerprint.
"""
