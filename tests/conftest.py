"""Makes the helper modules of this folder (tiny_models, ...) importable from every test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines that run this are shared: how long an example takes says nothing about the test.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Path of the bundled trained model."""
    return ROOT / "models" / "tiny-stories-moe"
