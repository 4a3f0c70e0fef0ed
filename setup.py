"""Builds the extension modules; everything else is in pyproject.toml.

zero_ext._C holds the ops and their CPU kernels. zero_ext._C_cuda, their CUDA kernels, is built too where
torch was built for CUDA and an nvcc fits it; else the installed package compiles it at first use, from the
sources that lie in the wheel for that, as it does with zero_ext._C_storage where torch is 2.11.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_by_path(path: Path) -> ModuleType:
    """A file that needs no other; the package cannot be imported yet."""
    spec = importlib.util.spec_from_file_location(f"setup_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {path}; run setup.py from a complete source tree")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


toolchain = load_by_path(ROOT / "zero_ext" / "ops" / "jit" / "toolchain.py")
hooks = load_by_path(ROOT / "zero_ext_import_hooks.py")


class BuildPython(build_py):
    """Adds to what is installed the sources of what is compiled at first use, as zero_ext/csrc, and the file
    that has Python call zero_ext_import_hooks.start when it starts, if a variable of it is set."""

    def run(self) -> None:
        super().run()
        name = Path(hooks.__file__ or "").stem
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        either = f"any(map(os.environ.get, {(hooks.VARIABLE, hooks.TRAINERS_VARIABLE)!r}))"
        line = f"import os; {either} and __import__({name!r}).start()\n"
        Path(folder, f"{name}.pth").write_text(line)
        if self.editable_mode:
            return
        cuda = [*toolchain.cuda_sources(ROOT), *toolchain.cuda_headers(ROOT)]
        for name in [*cuda, *toolchain.STORAGE_SOURCES]:
            target = Path(self.build_lib) / "zero_ext" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)


def device_flags() -> list[str]:
    """nvcc's flags: for the GPUs that torch's own variable names, else for those of the wheel."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not listed:
        return list(toolchain.NVCC_FLAGS)
    try:
        architectures = toolchain.architectures_listed(listed)
    except ValueError as error:
        raise SystemExit(f"TORCH_CUDA_ARCH_LIST: {error}") from None
    return [*toolchain.NVCC_COMPILE_FLAGS, *toolchain.architecture_flags(architectures)]


def cuda_toolkit() -> Path | None:
    """The toolkit to build _C_cuda with; None, and a line that says why, where it is left to first use."""
    if torch.version.cuda is None:
        return None
    try:
        found = toolchain.find_nvcc(torch.version.cuda, torch.__version__)
        # torch links by this name, which wheels of the toolkit leave out.
        link = toolchain.runtime_library(found).with_name("libcudart.so")
        if not link.exists():
            raise RuntimeError(f"there is no {link}")
    except RuntimeError as error:
        print(f"zero_ext._C_cuda is not built now but at its first use: {error}")
        return None
    return toolchain.toolkit_folder(found)


def macros(defines: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Without the one that BuildExtension defines itself; the modules check its value."""
    return [(name, value) for name, value in defines if name != "Py_LIMITED_API"]


def extensions(toolkit: Path | None) -> list[Extension]:
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
    if toolkit is None:
        return [cpu]
    cuda = CUDAExtension(
        name="zero_ext._C_cuda",
        sources=toolchain.cuda_sources(ROOT),
        depends=toolchain.cuda_headers(ROOT),
        define_macros=macros(toolchain.CUDA_DEFINES),
        extra_compile_args={"cxx": host_flags, "nvcc": device_flags()},
        py_limited_api=True,
    )
    return [cpu, cuda]


os.chdir(ROOT)
os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
toolkit = cuda_toolkit()
if toolkit is not None:
    os.environ["CUDA_HOME"] = str(toolkit)
# torch reads CUDA_HOME when this is imported, and takes a script on PATH for the toolkit's own nvcc.
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

setup(
    ext_modules=extensions(toolkit),
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPython},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
