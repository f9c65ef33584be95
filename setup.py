"""Builds the optional compiled kernels of csrc/ as `flowgrpo_fast._C`. All metadata is in pyproject.toml.

The extension is built against the torch that is installed, so it needs `pip install --no-build-isolation .`; in pip's isolated
build there is no torch, and the package is installed without it. It targets LibTorch's stable ABI (torch 2.11 and later) and Python's
limited API (abi3): one build serves every later torch and Python. CUDA sources are added where torch has CUDA and nvcc is there.

FLOWGRPO_BUILD_EXT=0 skips the extension, =1 makes a failed build an error. By default a failure costs the extension only.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

WANTED = os.environ.get("FLOWGRPO_BUILD_EXT", "")
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY", "-DPy_LIMITED_API=0x030A0000"]
# No contraction: every backend has the reference's bits. The other two only tell the compiler that nobody looks at errno or traps,
# without which it does not vectorise a square root or a choice between two values.
CXX = [
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-g0",
    # Eight-lane vectors pass between functions of one file only, where both sides are compiled alike.
    "-Wno-psabi",
    *DEFINES,
]
NVCC = ["-O3", "-std=c++20", "-fmad=false", *DEFINES]


def skipped(reason: str) -> dict:
    message = (
        f"flowgrpo_fast: compiled kernels skipped ({reason}); everything works without them, by Triton or pure torch"
    )
    if WANTED == "1":
        raise SystemExit(f"{message}. FLOWGRPO_BUILD_EXT=1 asked for them")
    print(message, file=sys.stderr)
    return {}


def extension() -> dict:
    """Arguments of setup() that build the extension; none where it is skipped."""
    if WANTED not in ("", "0", "1"):
        raise SystemExit(f"FLOWGRPO_BUILD_EXT: got {WANTED!r}; set 0 (skip), 1 (must build), or leave it unset")
    if WANTED == "0":
        return skipped("FLOWGRPO_BUILD_EXT=0")
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
    except ImportError:
        return skipped("no torch in the build environment: install torch, then pip install --no-build-isolation .")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return skipped(f"torch {torch.__version__} is older than 2.11")
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        return skipped(f"no C++ compiler: {compiler} is not found")

    def make(with_cuda: bool):
        kinds = ("*.cpp", "*.cu") if with_cuda else ("*.cpp",)
        cuda = ["-DUSE_CUDA"] if with_cuda else []
        return (CUDAExtension if with_cuda else CppExtension)(
            "flowgrpo_fast._C",
            sorted(str(path) for kind in kinds for path in Path("csrc").glob(kind)),
            depends=sorted(str(path) for kind in ("*.h", "*.cuh") for path in Path("csrc").glob(kind)),
            extra_compile_args={"cxx": CXX + cuda, "nvcc": NVCC + cuda},
            py_limited_api=True,
            optional=True,
        )

    class Build(BuildExtension):
        """Without the CUDA sources where these do not build, and without anything where nothing does."""

        def build_extensions(self):
            try:
                super().build_extensions()
            except Exception as error:  # whatever torch's version checks, the compiler, ninja or the linker raised
                if any(source.endswith(".cu") for extension in self.extensions for source in extension.sources):
                    print(f"flowgrpo_fast: CUDA kernels skipped (the build failed: {error})", file=sys.stderr)
                    self.extensions = [make(with_cuda=False)]
                    self.build_extensions()
                else:
                    skipped(f"the build failed: {error}")

    with_cuda = torch.version.cuda is not None and CUDA_HOME is not None and Path(CUDA_HOME, "bin", "nvcc").exists()
    return {
        "ext_modules": [make(with_cuda)],
        "cmdclass": {"build_ext": Build.with_options(use_ninja=shutil.which("ninja") is not None)},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**extension())
