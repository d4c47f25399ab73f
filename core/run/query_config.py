"""How queries are embedded for rows that a run has made."""

from __future__ import annotations

from dataclasses import dataclass

from core.models import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryConfig(ModelConfig):
    """A model as queries need it, which bears the fingerprint of the model that made the rows.

    What is asked may be a text where the rows are images, with another prompt, in another precision: none of that
    makes it another model.

    Attributes:
        rows: the config that made the rows.
    """

    rows: ModelConfig

    @property
    def identified_as(self) -> ModelConfig:
        """The config that made the rows."""
        return self.rows
