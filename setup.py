"""Builds the extension module zero_ext._C; everything else is in pyproject.toml."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

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


os.chdir(ROOT)
os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
toolchain = load_toolchain()
# BuildExtension defines Py_LIMITED_API itself; csrc/ops/module.cpp checks its value.
# Sources are relative, so no path of the building machine ends up in the error messages.
extension = CppExtension(
    name="zero_ext._C",
    sources=toolchain.sources(ROOT),
    depends=toolchain.headers(ROOT),
    define_macros=[(name, value) for name, value in toolchain.DEFINES if name != "Py_LIMITED_API"],
    extra_compile_args=[*toolchain.COMPILE_FLAGS, f"-fmacro-prefix-map={ROOT}/="],
    py_limited_api=True,
)
setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
