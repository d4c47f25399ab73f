"""The promises of a model family, for `letters`."""

import pytest

from embq.plugins import ModelConfig
from embq.testing.embedders import *  # noqa: F403


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """The model that the tests are about."""
    return ModelConfig(spec="letters:512", modalities=("text",), precision="fp32")
