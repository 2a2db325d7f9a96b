"""Makes the helper modules of this folder (tiny_models, ...) importable from every test."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def bundled() -> Path:
    """Path of the bundled trained model."""
    return ROOT / "models" / "tiny-stories-moe"
