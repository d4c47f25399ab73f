"""The interface for packages that add a model family, a kind of input or a map; see docs/how-to/contribute/plug-ins.md.

Plug-ins import from here and from `embq.testing` only: everything else may move.
"""

from embq.core.errors import InputError, ModelError, SampleError, SourceError
from embq.core.models import Chunking, ModelConfig, ModelFamily, ModelSpec
from embq.core.units import Sample, Unit, content_hash
from embq.sources.access.files import base_name, open_current, open_unchanged
from embq.sources.interface import SAMPLE_MAX_BYTES, Moved, Source, unwatched
from embq.sources.reader_options import ReadOptions
from embq.worker.embedders.base import ChunkableEmbedder, Embedder, Splitter
from embq.worker.embedders.sample_fields import check_modalities, prepare_each, text_of
from embq.worker.embedders.text.splitting import counted_splitter

__all__ = [
    "SAMPLE_MAX_BYTES",
    "ChunkableEmbedder",
    "Chunking",
    "Embedder",
    "InputError",
    "ModelConfig",
    "ModelError",
    "ModelFamily",
    "ModelSpec",
    "Moved",
    "ReadOptions",
    "Sample",
    "SampleError",
    "Source",
    "SourceError",
    "Splitter",
    "Unit",
    "base_name",
    "check_modalities",
    "content_hash",
    "counted_splitter",
    "open_current",
    "open_unchanged",
    "prepare_each",
    "text_of",
    "unwatched",
]
