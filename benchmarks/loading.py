"""Host memory of loading a 1.8 GB Qwen-Image transformer into ZeRO-3 partitions, on 2 and 4 CPU ranks: `python -m benchmarks.loading`.

Beyond the partition and what the process took before, a rank may take one shard of the checkpoint and one bucket of parameters. The peak is the
kernel's own (VmHWM), so nothing between two samples is missed. Writes results/loading_cpu.csv, which is committed when every rank is within that.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

RESULTS = Path(__file__).parent / "results" / "loading_cpu.csv"
SHARD_MB = 200
RANKS = (2, 4)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        builder = context.Process(target=build, args=(folder,))
        builder.start()
        builder.join()
        rows = [row for world in RANKS for row in measured(context, world, folder)]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(row)
    if not all(row["within"] for row in rows):
        sys.exit("a rank took more than one shard and one bucket")


def build(folder: str) -> None:
    import torch
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    network = QwenImageTransformer2DModel(
        num_layers=8, num_attention_heads=10, attention_head_dim=128, joint_attention_dim=1024, axes_dims_rope=(16, 56, 56)
    )  # fmt: skip
    network.save_pretrained(Path(folder) / "transformer", max_shard_size=f"{SHARD_MB}MB")


def measured(context: multiprocessing.context.SpawnContext, world: int, folder: str) -> list[dict[str, object]]:
    from flowgrpo_fast.rollout.wire import free_port

    queue = context.Queue()
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        context.Process(target=load, args=(queue, folder, shared | {"RANK": str(r), "LOCAL_RANK": str(r)}))
        for r in range(world)
    ]
    for rank in ranks:
        rank.start()
    rows = sorted((queue.get(timeout=600) for _ in ranks), key=lambda row: row["rank"])
    for rank in ranks:
        rank.join()
    return rows


def load(queue: multiprocessing.Queue, folder: str, environment: dict[str, str]) -> None:
    os.environ |= environment | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    import torch
    from diffusers import QwenImageTransformer2DModel

    from flowgrpo_fast import comm
    from flowgrpo_fast.engine.loading import BUCKET_BYTES, load_partitioned

    comm.initialize()

    class Adapter:
        dtype = torch.float32
        transformer_folder = Path(folder) / "transformer"

        def build_transformer(self) -> torch.nn.Module:
            return QwenImageTransformer2DModel.from_config(
                QwenImageTransformer2DModel.load_config(self.transformer_folder)
            )

    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    baseline, began = status("VmRSS"), time.perf_counter()
    network: Any = load_partitioned(cast(Any, Adapter()), settings)
    seconds, peak = time.perf_counter() - began, status("VmHWM")
    partition = sum(p.ds_tensor.numel() * 4 for p in network.parameters()) / 2**20
    whole = sum(p.ds_numel * 4 for p in network.parameters()) / 2**20
    index = json.loads((Adapter.transformer_folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    shard = max((Adapter.transformer_folder / f).stat().st_size for f in set(index["weight_map"].values())) / 2**20
    bucket = BUCKET_BYTES / 2**20
    beyond = peak - baseline - partition
    queue.put(
        {
            "ranks": int(environment["WORLD_SIZE"]), "rank": int(environment["RANK"]), "model_mib": round(whole), "partition_mib": round(partition),
            "baseline_mib": round(baseline), "peak_mib": round(peak), "beyond_mib": round(beyond), "shard_mib": round(shard), "bucket_mib": round(bucket),
            "within": beyond <= shard + bucket, "seconds": round(seconds, 1),
        }
    )  # fmt: skip


def status(field: str) -> float:
    """MiB, as /proc/self/status has it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
