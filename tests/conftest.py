"""Shared by all tests: fresh memory is poisoned, so that a kernel that forgets an element shows NaN instead of luck."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# The trainer tests compare bits between CPU ranks, on CUDA machines too. DeepSpeed reads this when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(autouse=True)
def poisoned_empty() -> Iterator[None]:
    """torch.empty & co return NaN (floating) or the dtype's maximum (integers) while deterministic mode is on."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
