"""What can be checked about rollout servers before any weight is loaded: settings, devices, and the other Python environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import torch

from flowgrpo_fast.config import Config, ConfigError
from flowgrpo_fast.rollout.vllm_omni.engine_settings import engine_settings
from flowgrpo_fast.rollout.vllm_omni.process import server_environment
from flowgrpo_fast.rollout.wire import VLLM_OMNI
from flowgrpo_fast.version import __version__

HINT = "`make setup-vllm` builds .venv-rollout: set rollout.python to its bin/python"
ASK = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("flowgrpo_fast", "vllm-omni", "vllm"):
    try: found[name] = version(name)
    except PackageNotFoundError: found[name] = None
print(json.dumps(found))
"""


def check(config: Config) -> None:
    """Raises ConfigError."""
    check_settings(config)
    if config.rollout.server.replicas:
        check_environment(config.rollout.python)


def check_settings(config: Config) -> None:
    s = config.rollout.server
    engine_settings(config)
    if s.replicas == 0 and not s.addresses:
        raise ConfigError(
            "rollout.server.replicas is 0 and rollout.server.addresses is empty: there is no server to sample from"
        )
    if s.replicas == 0:
        return
    if s.cpu:
        if torch.cuda.is_available():
            raise ConfigError("rollout.server.cpu is true, but this machine has an accelerator; set it to false")
        _require_devices(s.tensor_parallel_size, 1)
        return
    available = len(s.devices) if s.devices is not None else torch.cuda.device_count()
    wanted = s.replicas * s.tensor_parallel_size
    if wanted > available:
        raise ConfigError(
            f"rollout.server.replicas {s.replicas} x tensor_parallel_size {s.tensor_parallel_size} needs {wanted} device(s), there are"
            f" {available}; set rollout.server.devices, or rollout.server.cpu: true to run the engine on the CPU"
        )


def check_server(config: Config) -> None:
    """For one server, on the devices that it may see."""
    engine_settings(config)
    server = config.rollout.server
    _require_devices(server.tensor_parallel_size, 1 if server.cpu else torch.cuda.device_count())


def _require_devices(tensor_parallel_size: int, available: int) -> None:
    if tensor_parallel_size > available:
        raise ConfigError(
            f"rollout.server.tensor_parallel_size {tensor_parallel_size} is larger than the {available} device(s) of this server"
        )


def check_environment(python: str | None) -> None:
    """The interpreter of the servers: is it there, and does it have this package and the supported vllm-omni?"""
    python = python or sys.executable
    found_at = shutil.which(python)
    if found_at is None:
        raise ConfigError(f"rollout.python = {python!r} is not an executable; {HINT}")
    asked = subprocess.run(
        [os.path.abspath(found_at), "-c", ASK],
        capture_output=True,
        text=True,
        cwd="/",
        env=server_environment(os.environ, None, 1),
    )
    if asked.returncode != 0:
        raise ConfigError(f"rollout.python = {python!r} does not run: {asked.stderr.strip()[-300:]}; {HINT}")
    found = json.loads(asked.stdout)
    for package in ("vllm-omni", "vllm"):
        if not (found[package] or "").startswith(f"{VLLM_OMNI}."):
            state = "is not installed" if found[package] is None else f"{found[package]} is installed"
            raise ConfigError(
                f"rollout.backend vllm_omni needs {package} {VLLM_OMNI}.x, which {state} for {python}; {HINT}"
            )
    if found["flowgrpo_fast"] != __version__:
        raise ConfigError(
            f"{python} has {'no flowgrpo_fast' if found['flowgrpo_fast'] is None else 'flowgrpo_fast ' + found['flowgrpo_fast']}, the trainer"
            f" is {__version__}: install the same version there ({python} -m pip install --no-deps -e .); {HINT}"
        )
