"""Code generation of the kernels, without a GPU: Triton ahead of time and nvcc, each for sm_80, sm_90 and sm_100."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (80, 90, 100)
CHUNK = 4096
# Registers a thread at 128 (policy_loss: 256) threads a block. 128 leave four blocks on a multiprocessor, enough in flight for its bandwidth.
CEILING = {
    "sde_step_kernel": 128,
    "scale_rows_kernel": 48,
    "sde_log_prob_kernel": 224,  # CFG with rescale, reference and old velocity at once; 128 without them
    "sde_log_prob_backward_kernel": 112,
    "finalize_kernel": 64,
    "linear_kernel": 48,
    "linear_backward_kernel": 48,
    "rescale_kernel": 64,
    "rescale_backward_kernel": 80,
    "group_advantage_kernel": 80,
    "policy_loss_kernel": 64,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """In a process of its own: the interpreter, once imported, has no compiler."""
    out = tmp_path_factory.mktemp("aot") / "aot.csv"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-m", "benchmarks.aot", "--out", out], cwd=ROOT, env=env, check=True, timeout=900)
    with out.open() as file:
        return list(csv.DictReader(file))


def test_every_kernel_is_compiled_for_every_architecture(rows: list[dict[str, str]]) -> None:
    kernels = {
        name
        for path in (ROOT / "flowgrpo_fast/ops/triton").glob("*.py")
        for name in re.findall(r"def (\w+_kernel)\(", path.read_text())
    }
    assert {(row["kernel"], int(row["sm"])) for row in rows} == {(k, sm) for k in kernels for sm in ARCHITECTURES}
    assert kernels == set(CEILING)


def test_no_kernel_uses_local_memory_and_none_exceeds_its_registers(rows: list[dict[str, str]]) -> None:
    """For latents whose length is a multiple of 16. Others are right as well, but their trees of sums spill on sm_80 and sm_100."""
    for row in rows:
        if row["variant"] == "ones":
            continue
        assert (row["stack"], row["local"]) == ("0", "0"), row
        assert int(row["registers"]) <= CEILING[row["kernel"]], row


def test_plain_log_prob_stays_below_128_registers(rows: list[dict[str, str]]) -> None:
    for row in rows:
        if row["kernel"] == "sde_log_prob_kernel" and row["variant"] in ("v=fp32", "v=bf16", "v=fp16"):
            assert int(row["registers"]) <= 128, row


def test_latents_move_in_16_byte_accesses_and_each_input_is_read_once(rows: list[dict[str, str]]) -> None:
    """Bytes by 16-byte accesses of a program = the bytes of its chunk in every input and output, and there is no narrow one."""
    for row in rows:
        v = {"fp32": 4, "bf16": 2, "fp16": 2}.get(row["variant"].removeprefix("v=").split(" ")[0], 4)
        words = row["variant"].split(" ")
        if words[0] == "ones":  # nothing to align
            continue
        branches, extra = 1 + ("cfg" in words), ("ref" in words) + ("old" in words)
        expected = {
            "sde_step_kernel": (4 * 2 + v, 4) if "noise" in words else (2 * v, v),
            "scale_rows_kernel": (4, v),
            "sde_log_prob_kernel": (8 + v * (branches + extra), 0),
            "sde_log_prob_backward_kernel": (8 + v * (branches + extra), v * branches),
            "linear_kernel": (2 * v, v),
            "linear_backward_kernel": (v, 2 * v),
            "rescale_kernel": (2 * v / 4, v / 4),  # a program has one block of 1,024 lanes, not four
            "rescale_backward_kernel": (3 * v / 4, 2 * v / 4),
        }
        if row["kernel"] in expected:
            loads, stores = expected[row["kernel"]]
            if row["variant"] == "flow_grpo" and row["kernel"] == "sde_log_prob_kernel":
                loads += 4  # its old velocity
            if row["variant"] == "flow_grpo" and row["kernel"] == "sde_log_prob_backward_kernel":
                loads += 4  # its reference
            assert (int(row["load_bytes"]), int(row["store_bytes"])) == (CHUNK * loads, CHUNK * stores), row
            assert row["narrow"] == "0", row


def test_committed_table_is_that_of_the_code(rows: list[dict[str, str]]) -> None:
    """benchmarks/results/aot.csv lists the kernels and variants of today (registers may move with the compiler)."""
    with (ROOT / "benchmarks/results/aot.csv").open() as file:
        committed = list(csv.DictReader(file))
    names = ("kernel", "variant", "sm", "load_bytes", "store_bytes", "stack", "local")
    assert [[row[n] for n in names] for row in committed] == [[row[n] for n in names] for row in rows]


@pytest.mark.parametrize("source", sorted((ROOT / "csrc").glob("*.cu")), ids=lambda path: path.name)
def test_nvcc_compiles_without_a_spill(source: Path, tmp_path: Path) -> None:
    """Not collected where there is no nvcc (conftest.py says so in the header); on CI there is."""
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in ARCHITECTURES]
    defines = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY", "-DUSE_CUDA"]
    include = Path(torch.__file__).parent / "include"
    flags = ["-c", "-O3", "-std=c++20", "-fmad=false", "-Xptxas", "-v,-warn-spills,-Werror", f"-I{include}"]
    result = subprocess.run(
        ["nvcc", *flags, *targets, *defines, str(source), "-o", str(tmp_path / "out.o")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    assert stacks
    assert set(stacks) == {("0", "0", "0")}, result.stderr
