"""`pytest benchmarks` measures, although pyproject.toml switches pytest-benchmark off for `pytest`; --benchmark-disable still runs once each."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if "--benchmark-disable" not in config.invocation_params.args:
        config.option.benchmark_enable = True
