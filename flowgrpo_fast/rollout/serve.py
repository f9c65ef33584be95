"""python -m flowgrpo_fast.rollout.serve --config X.yaml --address tcp://0.0.0.0:5555 [key=value ...]

Runs one rollout server until it is told to stop. The trainer starts its own; by hand for other nodes (`rollout.server.addresses`).
Exit codes: 0 stopped, 2 bad input (one line says what and how to fix it), 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from flowgrpo_fast.config import ConfigError
from flowgrpo_fast.config_file import load_config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="flowgrpo_fast.rollout.serve", description=__doc__)
    parser.add_argument("--config", required=True, help="the training run's YAML file")
    parser.add_argument("--address", required=True, help="where to listen, e.g. tcp://0.0.0.0:5555")
    parser.add_argument("--parent", type=int, default=None, help="pid of the trainer that this server dies with")
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=60.0,
        help="stop after so many seconds without a sign of a trainer, once there was one",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        from flowgrpo_fast.rollout.vllm_omni.preflight import check_environment, check_server

        check_server(config)
        check_environment(sys.executable)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if config.rollout.server.cpu:
        from flowgrpo_fast.rollout.vllm_omni.plugin import CPU_SWITCH

        os.environ[CPU_SWITCH] = "1"
    from flowgrpo_fast.rollout.vllm_omni.server import RolloutServer, die_with_parent

    if arguments.parent is not None:
        die_with_parent(arguments.parent)

    async def run() -> None:
        await RolloutServer(config, arguments.address, arguments.heartbeat).serve()

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
