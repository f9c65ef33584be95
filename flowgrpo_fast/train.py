"""deepspeed flowgrpo_fast/train.py --config configs/glyphs.yaml [key=value ...] [--dry-run]

Exit codes: 0 done, or stopped on request and saved; 2 bad input (one line says what and how to fix it), 1 anything else.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts this folder first on sys.path, where our config.py or schedule.py would shadow other people's
# modules. Put the folder that holds the package there instead: works installed and from a checkout alike.
HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0] or ".").resolve() == HERE:
    sys.path[0] = str(HERE.parent)
# The working folder last: `module:function` rewards and agent loops of the user are found there and shadow nothing.
sys.path.append(str(Path.cwd()))

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
from datetime import timedelta  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from flowgrpo_fast.config import Config, ConfigError  # noqa: E402
from flowgrpo_fast.config_file import load_config  # noqa: E402

if TYPE_CHECKING:
    from flowgrpo_fast.dashboard import Dashboard


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Online RL for flow-matching generators. Launch with `deepspeed`, or plainly for one process.",
    )
    parser.add_argument("--config", required=True, help="YAML file, e.g. configs/glyphs.yaml")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config, the DeepSpeed dict, the batch and memory arithmetic, then stop",
    )
    parser.add_argument(
        "--dashboard",
        type=int,
        nargs="?",
        const=8400,
        metavar="PORT",
        help="serve a live page of the run on this machine (default port 8400; 0: any free one); put it last, or write --dashboard=PORT",
    )
    parser.add_argument("--local_rank", type=int, default=None, help="set by the launcher")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.total_steps=10")
    return parser.parse_intermixed_args(argv)  # options may stand between overrides


def settle_environment(config: Config, local_rank: int | None) -> None:
    """Rank variables for a plain single process, and CPU threads = cores / ranks (two ranks with all cores each lose 20 %)."""
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    ranks_here = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // ranks_here)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Nothing is ever downloaded: a missing model is an error, not a request.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import torch

    torch.set_num_threads(threads)
    if config.engine.deterministic:
        # cuBLAS reads this at its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def dry_run(config: Config) -> None:
    import torch

    from flowgrpo_fast.checkpoint import find_checkpoint
    from flowgrpo_fast.engine import DTYPES, deepspeed_config
    from flowgrpo_fast.inputs import Inputs
    from flowgrpo_fast.memory import count_parameters, memory_lines
    from flowgrpo_fast.models import build_adapter

    inputs = Inputs(config, int(os.environ["WORLD_SIZE"]))
    find_checkpoint(config.trainer.resume, Path(config.run_dir).expanduser())
    adapter = build_adapter(config.model.family, config.model.path, torch.device("cpu"), DTYPES[config.model.dtype])
    plan, sigmas = inputs.plan(config, adapter)
    if os.environ["RANK"] != "0":
        return
    print(config.to_yaml())
    print("DeepSpeed:", json.dumps(deepspeed_config(config, plan), indent=2))
    print("sigmas:", [round(float(s), 5) for s in sigmas])
    print("\n".join(plan.lines()))
    print("\n".join(memory_lines(config, count_parameters(config, adapter), plan.world_size)))


def train(config: Config, dashboard_port: int | None = None) -> None:
    import torch

    from flowgrpo_fast import comm
    from flowgrpo_fast.engine import local_device
    from flowgrpo_fast.inputs import Inputs
    from flowgrpo_fast.trainer import Trainer

    inputs = Inputs(config, int(os.environ["WORLD_SIZE"]))
    device = local_device()
    # Longer than the watch on progress: who hangs is to be seen in its own stack, not in the others' time-outs.
    comm.initialize(timedelta(seconds=config.engine.timeout_s + 60))
    torch.manual_seed(config.seed)
    dashboard: Dashboard | None = None
    try:
        if dashboard_port is not None:
            dashboard = comm.together(lambda: start_dashboard(config, dashboard_port), device)
        Trainer(config, inputs, device).run()
        comm.barrier()
    finally:
        if dashboard is not None:
            dashboard.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start_dashboard(config: Config, port: int) -> Dashboard | None:
    """On rank 0."""
    from flowgrpo_fast.dashboard import Dashboard

    if os.environ["RANK"] != "0":
        return None
    try:
        dashboard = Dashboard(Path(config.run_dir).expanduser(), port=port).start()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dashboard {port}: {error}") from error
    print(f"dashboard: {dashboard.url}", flush=True)
    return dashboard


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        settle_environment(config, arguments.local_rank)
        from flowgrpo_fast.data.prompts import PromptFileError

        try:
            if arguments.dry_run:
                dry_run(config)
            else:
                train(config, arguments.dashboard)
        except PromptFileError as error:
            raise ConfigError(str(error)) from error
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        else:
            # The launcher ends all ranks with the first that fails: leave rank 0 the time to say why.
            time.sleep(2)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
