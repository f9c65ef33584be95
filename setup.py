"""All metadata is in pyproject.toml. This file is where the optional compiled kernels of `csrc/` get built."""

from setuptools import setup

setup()
