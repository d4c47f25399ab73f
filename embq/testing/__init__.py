"""The contract suites of embq, by which plug-ins prove themselves; they need pytest."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("embq.testing.embedders", "embq.testing.sources")
