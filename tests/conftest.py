"""Shared by all tests. Folder-specific fixtures stand in that folder's conftest."""

from __future__ import annotations

import os

# Before torch is imported: beside another busy process, OpenMP's spinning threads run many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test may reach out, or write into the user's home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT
