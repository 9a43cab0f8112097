from __future__ import annotations

import pytest
from sample_following import Training


@pytest.fixture
def training() -> Training:
    return Training()
