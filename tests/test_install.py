"""`pip install .` with and without a compiler, and what is in the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def wheel(into: Path, **environment: str) -> tuple[Path, str]:
    """Builds from a copy of what git tracks, so that no build folder or extension of the checkout can help."""
    copy = into / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, tracked):
        path = Path(os.fsdecode(name))
        if path.parts[0] in ("flowgrpo_fast", "csrc", "setup.py", "pyproject.toml", "README.md"):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_bytes((ROOT / path).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        ".",
    ]
    result = subprocess.run(
        [*command, "-w", str(into)],
        cwd=copy,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    (built,) = into.glob("*.whl")
    return built, text


def assert_works(built: Path, site: Path, backend: str) -> None:
    """Unpacked and imported from there: an op runs on the backend without a warning."""
    zipfile.ZipFile(built).extractall(site)
    code = """
import torch, flowgrpo_fast
from flowgrpo_fast.ops import cfg_combine
assert cfg_combine(torch.ones(1, 2), torch.zeros(1, 2), 3.0).tolist() == [[3.0, 3.0]]
print(flowgrpo_fast.__file__)
"""
    env = {**os.environ, "PYTHONPATH": str(site), "FLOWGRPO_BACKEND": backend}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, cwd=site.parent, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().startswith(str(site))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "/nonexistent/c++"}, "no C++ compiler: /nonexistent/c++ is not found"),
        ({"FLOWGRPO_BUILD_EXT": "0"}, "FLOWGRPO_BUILD_EXT=0"),
        ({"CXX": "false"}, "the build failed"),
    ],
)
def test_without_the_extension_one_line_says_so_and_the_package_works(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    built, text = wheel(tmp_path, **environment)
    # pip runs setup.py once for the metadata and once for the wheel.
    (line,) = {line.strip() for line in text.splitlines() if "compiled kernels skipped" in line}
    assert reason in line
    names = zipfile.ZipFile(built).namelist()
    assert not any("_C" in name for name in names)
    assert "flowgrpo_fast/assets/glyphs/model_index.json" in names
    assert_works(built, tmp_path / "site", "auto")


def test_with_a_compiler_one_wheel_serves_every_python(tmp_path: Path) -> None:
    built, text = wheel(tmp_path, FLOWGRPO_BUILD_EXT="1")
    assert "skipped" not in text
    assert "-cp311-abi3-" in built.name
    assert "flowgrpo_fast/_C.abi3.so" in zipfile.ZipFile(built).namelist()
    assert_works(built, tmp_path / "site", "cpp")
    metadata = next(name for name in zipfile.ZipFile(built).namelist() if name.endswith("METADATA"))
    requires = [
        line for line in zipfile.ZipFile(built).read(metadata).decode().splitlines() if line.startswith("Requires-Dist")
    ]
    assert [line for line in requires if "extra ==" not in line] == ["Requires-Dist: torch>=2.11"]
