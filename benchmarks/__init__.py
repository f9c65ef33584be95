"""Benchmarks: every op beside eager PyTorch, `torch.compile` and the peers' formulas, each row with its own correctness.

| command | measures |
|---|---|
| `python -m benchmarks.kernels` | every op: time, share of the copy bandwidth, bytes, launches |
| `python -m benchmarks.training_step` | the loss of one micro-batch: launches, bytes that autograd keeps |
| `python -m benchmarks.step` | a whole step, rollout and update, on two ZeRO-3 ranks, against the peers' loop |
| `python -m benchmarks.advantages` | group advantages, 64 to 65,536 rewards, against the peers' Python loops |
| `python -m benchmarks.exchange` | RolloutBatch to another process, against nested lists and pickle |
| `python -m benchmarks.roofline` | GB/s against the copy of equally many bytes, by size |
| `python -m benchmarks.aot` | what the compiler makes of each Triton kernel, without a GPU |
| `python -m benchmarks.plot` | the CSV files in `benchmarks/results` as SVG |
| `python benchmarks/gpu_check.py` | one GPU, under 8 minutes: correctness, tables, summary |
| `pytest benchmarks` | pytest-benchmark rows of every op at one shape |
"""

import os

# Kineto announces every profile on stderr, two lines each: hundreds between the rows. Read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
