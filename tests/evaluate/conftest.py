"""Fixtures of the tests of publishing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluate.published import REAL, Run, byte_tokenizer, make_draft


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of 96 words, untied."""
    return make_draft(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with a byte-level tokenizer of 283 tokens, tied: a GGUF of it can be written."""
    return make_draft(tmp_path_factory.mktemp("bytes"), rows=REAL, tied=True, tokenizer=byte_tokenizer(), spread=4.0)


@pytest.fixture
def run(tmp_path: Path, tiny: Path) -> Run:
    return Run(tmp_path / "home-of-a-person", tiny)


@pytest.fixture
def byte_run(tmp_path: Path, tiny_bytes: Path) -> Run:
    return Run(tmp_path / "home-of-a-person", tiny_bytes, rows=REAL)
