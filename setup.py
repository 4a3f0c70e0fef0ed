"""Builds the extension modules; everything else is in pyproject.toml.

zero_ext._C holds the ops and their CPU kernels. zero_ext._C_cuda, their CUDA kernels, is built too where
torch was built for CUDA and nvcc is installed.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import torch
from setuptools import Extension, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).resolve().parent


def load_toolchain() -> ModuleType:
    """The compile settings, loaded by path because the package cannot be imported yet."""
    path = ROOT / "zero_ext" / "ops" / "toolchain.py"
    spec = importlib.util.spec_from_file_location("zero_ext_toolchain", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {path}; run setup.py from a complete source tree")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def macros(defines: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Without the one that BuildExtension defines itself; the modules check its value."""
    return [(name, value) for name, value in defines if name != "Py_LIMITED_API"]


def extensions(toolchain: ModuleType) -> list[Extension]:
    """The modules that this torch and this machine can build.

    Sources are relative, so no path of the building machine ends up in the error messages.
    """
    host_flags = [*toolchain.COMPILE_FLAGS, f"-fmacro-prefix-map={ROOT}/="]
    cpu = CppExtension(
        name="zero_ext._C",
        sources=toolchain.sources(ROOT),
        depends=toolchain.headers(ROOT),
        define_macros=macros(toolchain.DEFINES),
        extra_compile_args=host_flags,
        py_limited_api=True,
    )
    if torch.version.cuda is None:
        return [cpu]
    if CUDA_HOME is None:
        print(f"zero_ext._C_cuda is not built: torch is for CUDA {torch.version.cuda}, but there is no nvcc")
        return [cpu]
    cuda = CUDAExtension(
        name="zero_ext._C_cuda",
        sources=toolchain.cuda_sources(ROOT),
        depends=toolchain.cuda_headers(ROOT),
        define_macros=macros(toolchain.CUDA_DEFINES),
        extra_compile_args={"cxx": host_flags, "nvcc": list(toolchain.NVCC_FLAGS)},
        py_limited_api=True,
    )
    return [cpu, cuda]


os.chdir(ROOT)
os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
setup(
    ext_modules=extensions(load_toolchain()),
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
