"""One request for a group against one request an image, by the real vllm-omni: `python -m benchmarks.rollout` -> benchmarks/results/rollout_<device>.csv.

glyphs, 64 x 64, 6 steps, a group of 16 with noise of its own per sample, so that nothing but the batching differs. Images are decoded and have
arrived in the trainer's memory when the clock stops. The 16 requests are in flight together. `in process` is the same sampler without a server.
Needs `make setup-vllm`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Neighbours, time_all, warn_if_busy
from benchmarks.table import RESULTS, ROOT, Table
from flowgrpo_fast.batch import RolloutBatch
from flowgrpo_fast.config_file import load_config
from flowgrpo_fast.inputs import sampling_params
from flowgrpo_fast.models import build_adapter
from flowgrpo_fast.rollout.base import RolloutRequest
from flowgrpo_fast.rollout.in_process import InProcessRollout
from flowgrpo_fast.rollout.vllm_omni.client import ServerClient
from flowgrpo_fast.rollout.vllm_omni.process import ServerProcess
from flowgrpo_fast.rollout.weights import FlatTensors

GROUP, SINGLES, HERE = "one request of 16", "16 requests of 1", "in process"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=str(ROOT / ".venv-rollout" / "bin" / "python"), help="of the servers")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    warn_if_busy("before the measurement")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load_config(
        ROOT / "configs" / "glyphs_vllm_omni.yaml",
        ["rollout.initial_noise=sample", f"rollout.python={args.python}", f"rollout.server.cpu={str(device == 'cpu').lower()}"],
    )  # fmt: skip
    adapter = build_adapter(config.model.family, config.model.path, torch.device(device), torch.float32)
    transformer = adapter.load_transformer().eval()
    here = InProcessRollout(adapter, transformer, config.rollout.sigmas, torch.device(device))
    sampling = sampling_params(config, 3)

    def requests_of(ids: torch.Tensor) -> RolloutRequest:
        return RolloutRequest(0, adapter.tokenize(["Ab"], 64), None, ids, torch.ones_like(ids))

    whole = [requests_of(torch.arange(args.group))]
    single = [[requests_of(torch.tensor([i]))] for i in range(args.group)]
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.group) as pool:
        path = Path(folder) / "config.yaml"
        path.write_text(config.to_yaml())
        process = ServerProcess(args.python, path, Path(folder) / "server.log", 0, None, threads)
        client = ServerClient(process.address, process, 600, torch.device(device))
        try:
            client.hello(600)
            state = {name: p.detach() for name, p in transformer.named_parameters()}
            client.push("bucket", {"version": 0, "last": True}, FlatTensors.pack(state, torch.float32), None)
            runs: dict[str, Callable[[], Any]] = {
                GROUP: lambda: [client.generate(whole, sampling, 0, "group")],
                SINGLES: lambda: list(pool.map(lambda r: client.generate(r, sampling, 0, str(r[0].sample_id)), single)),
                HERE: lambda: [here.generate(whole, sampling, 0)],
            }
            images = {name: RolloutBatch.concat(run()).images for name, run in runs.items()}
            with Neighbours(ours=[process.process.pid]) as neighbours:
                timings = time_all(runs, "cpu", args.seconds)
        finally:
            client.close()
    expected = images[HERE]
    assert expected is not None
    with Table(args.out / f"rollout_{device}.csv", device) as table:
        for name, t in timings.items():
            if name not in runs:
                continue
            got = images[name]
            assert got is not None
            # Another batch shape rounds differently: a grey level at most.
            match = int((got.int() - expected.int()).abs().max()) <= 1
            table.add(
                op="rollout", variant=name, backend="in process" if name == HERE else "vllm-omni", shape="glyphs 64", batch=args.group,
                dtype="float32", median_ms=1e3 * t.median, p20_ms=1e3 * t.p20, p80_ms=1e3 * t.p80, samples=t.samples,
                times_faster=timings[SINGLES].median / t.median, match=match, idle=neighbours.idle, others=neighbours.others,
            )  # fmt: skip
    warn_if_busy("after the measurement")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
