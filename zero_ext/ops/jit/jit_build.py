"""Builds the extension modules just in time: ``_C``, the ops, ``_C_cuda``, their CUDA kernels, and
``_C_storage``, which torch 2.11 needs.

Once for each torch, state of the sources and set of GPUs; ranks that start together build once. See
:mod:`zero_ext.ops.jit.build_cache` for where the result lies.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from zero_ext.ops.jit import toolchain
from zero_ext.ops.jit.build_cache import CachedModule, build_key, cache_folder
from zero_ext.ops.jit.compiler_jobs import CompilerCall, Progress, run_calls
from zero_ext.ops.jit.toolchain import (
    Architecture,
    check_host_compiler,
    find_nvcc,
    fitted_architectures,
    runtime_library,
)

MODULE = "_C"
CUDA_MODULE = "_C_cuda"
STORAGE_MODULE = "_C_storage"


@dataclass(frozen=True)
class BuildRecipe:
    """The compilation of a module: one compiler call up to the object file's name a source, and the
    linker's.
    """

    root: Path
    sources: list[str]
    compile: Callable[[str], list[str]]
    link: list[str]  # up to the objects
    libraries: list[str]


def source_root(module: str) -> Path:
    """Return the folder that holds the sources, ``csrc``: the package's own, or that of its checkout.

    Raises:
        RuntimeError: the package was installed without its sources.
    """
    package = Path(__file__).resolve().parents[2]
    for root in (package, package.parent):
        if (root / "csrc" / "ops").is_dir() and (root / "csrc" / "cuda").is_dir():
            return root
    raise RuntimeError(
        f"zero_ext.{module}: it is not built, and {package / 'csrc'} does not exist. Install zero_ext again "
        "from a wheel or from a complete source tree."
    )


def find_compiler(module: str) -> str:
    """Path of the C++ compiler: ``$CXX``, else ``c++``, ``g++`` or ``clang++``.

    Raises:
        RuntimeError: none of them is installed.
    """
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for candidate in filter(None, candidates):
        path = shutil.which(candidate)
        if path is not None:
            return path
    raise RuntimeError(
        f"zero_ext.{module}: it is not built, and no C++ compiler was found (tried $CXX, c++, g++, clang++). "
        "Install one, for example with apt-get install g++."
    )


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _includes() -> list[str]:
    folders = (_torch_folder() / "include", Path(sysconfig.get_path("include")))
    return [flag for folder in folders for flag in ("-isystem", str(folder))]


def _macros(defines: Iterable[tuple[str, str]]) -> list[str]:
    return [f"-D{name}={value}" for name, value in defines]


def host_recipe(root: Path) -> BuildRecipe:
    """Return how ``_C`` is made.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    compiler = find_compiler(MODULE)
    flags = [*toolchain.COMPILE_FLAGS, *_macros(toolchain.DEFINES), *_includes()]
    return BuildRecipe(
        root=root,
        sources=toolchain.sources(root),
        compile=lambda name: [compiler, *flags, "-c", name, "-o"],
        link=[compiler, "-shared"],
        libraries=[f"-L{_torch_folder() / 'lib'}", "-ltorch_cpu"],
    )


def storage_recipe(root: Path) -> BuildRecipe:
    """Return how ``_C_storage`` is made.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    compiler = find_compiler(STORAGE_MODULE)
    flags = [*toolchain.COMPILE_FLAGS, *_macros(_storage_defines()), *_includes()]
    return BuildRecipe(
        root=root,
        sources=list(toolchain.STORAGE_SOURCES),
        compile=lambda name: [compiler, *flags, "-c", name, "-o"],
        link=[compiler, "-shared"],
        libraries=[f"-L{_torch_folder() / 'lib'}", "-lc10"],
    )


def _storage_defines() -> list[tuple[str, str]]:
    abi = str(int(torch.compiled_with_cxx11_abi()))
    return [*toolchain.STORAGE_DEFINES, ("_GLIBCXX_USE_CXX11_ABI", abi)]


def cuda_recipe(root: Path, architectures: Iterable[Architecture]) -> BuildRecipe:
    """Return how ``_C_cuda`` is made for GPUs of the given compute capabilities.

    Raises:
        RuntimeError: torch is not for CUDA, or nvcc or the C++ compiler is missing or does not fit.
    """
    if torch.version.cuda is None:
        raise RuntimeError(
            f"zero_ext.{CUDA_MODULE}: expected a torch with CUDA to build it for, got torch "
            f"{torch.__version__}, which is built without CUDA. Install a torch with CUDA "
            "(see pytorch.org/get-started)."
        )
    nvcc = find_nvcc(torch.version.cuda, torch.__version__)
    compiler = find_compiler(CUDA_MODULE)
    check_host_compiler(nvcc, compiler, toolchain.NVCC_COMPILE_FLAGS)
    fitted = fitted_architectures(nvcc, architectures, toolchain.OLDEST_ARCHITECTURE)
    definitions = [*_macros(toolchain.CUDA_DEFINES), *_includes()]
    device = [*toolchain.NVCC_COMPILE_FLAGS, *toolchain.architecture_flags(fitted), *definitions]
    host = [compiler, *toolchain.COMPILE_FLAGS, *definitions]
    call = [str(nvcc.path), "-ccbin", compiler]

    def compile_call(name: str) -> list[str]:
        return [*(call + device if name.endswith(".cu") else host), "-c", name, "-o"]

    return BuildRecipe(
        root=root,
        sources=toolchain.cuda_sources(root),
        compile=compile_call,
        link=[*call, "-shared", "--cudart=none", "-Xlinker=--as-needed"],
        libraries=[
            f"-L{_torch_folder() / 'lib'}",
            "-ltorch_cpu",
            "-ltorch_cuda",
            f"-Xlinker={runtime_library(nvcc)}",
        ],
    )


def make(module: CachedModule, recipe: BuildRecipe) -> None:
    """Compile and link `module` in its folder. The caller holds its lock.

    Raises:
        RuntimeError: a compiler refused; the error names the log, which holds all calls and their output.
    """
    for leftover in module.folder.glob("building-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # Large files first, so that none of them is compiled alone at the end.
    names = sorted(recipe.sources, key=lambda name: -(recipe.root / name).stat().st_size)
    progress = Progress(f"zero_ext.{module.name}", len(names))
    progress.start(module.folder)
    with (
        tempfile.TemporaryDirectory(dir=module.folder, prefix="building-") as folder,
        module.log.open("wb") as log,
    ):
        objects = {name: str(Path(folder) / f"{index}.o") for index, name in enumerate(names)}
        linked = Path(folder) / module.path.name
        calls = [CompilerCall(name, [*recipe.compile(name), objects[name]]) for name in names]
        link = [*recipe.link, *objects.values(), *recipe.libraries, "-o", str(linked)]
        try:
            run_calls(calls, recipe.root, log, progress)
            run_calls([CompilerCall("linking", link)], recipe.root, log, progress, done=len(names))
        except RuntimeError as error:
            progress.end("failed to build")
            raise RuntimeError(
                f"building zero_ext.{module.name}: {error}\nSee the full log: {module.log}"
            ) from None
        module.put(linked)
    progress.end("built")


def obtain(module: CachedModule, recipe: Callable[[], BuildRecipe], unusable: object = None) -> None:
    """Sees to it that `module` is in the cache; `recipe` is asked for only if it must be compiled.

    A file with the state `unusable` is compiled anew.

    Raises:
        RuntimeError: it cannot be built, in this process or in the one that was waited for.
    """

    def is_there() -> bool:
        return module.is_complete() and (unusable is None or module.state() != unusable)

    if is_there():
        return
    with module.locked():
        if is_there():
            return
        try:
            _make_or_explain(module, recipe)
        except RuntimeError as error:
            # If this cannot be written either, the processes that wait build for themselves.
            with suppress(OSError):
                module.note_failure(str(error))
            raise


def _make_or_explain(module: CachedModule, recipe: Callable[[], BuildRecipe]) -> None:
    try:
        make(module, recipe())
    except OSError as error:
        raise RuntimeError(
            f"building zero_ext.{module.name}: the folder {module.folder} cannot be used: {error}. Free "
            "space there, or set XDG_CACHE_HOME to another folder."
        ) from error


def load_from_cache(module: CachedModule, recipe: Callable[[], BuildRecipe]) -> ModuleType:
    """Import `module`, built first where needed, and once more where the one in the cache does not load.

    Raises:
        RuntimeError: it cannot be built, or the new one does not load either.
    """
    obtain(module, recipe)
    state = module.state()
    try:
        return import_from(module)
    except ImportError as error:
        print(f"zero_ext: {module.path} does not load and is built again: {error}", file=sys.stderr)
    obtain(module, recipe, unusable=state)
    try:
        return import_from(module)
    except ImportError as error:
        raise RuntimeError(
            f"{module.path}: it was just built and does not load: {error}. See its log: {module.log}"
        ) from error


def import_from(module: CachedModule) -> ModuleType:
    """Import a module of the cache as ``zero_ext.<its name>``."""
    name = f"zero_ext.{module.name}"
    spec = importlib.util.spec_from_file_location(name, module.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module.path}: expected an extension module. Remove it to have it built again.")
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    sys.modules[name] = imported
    return imported


def cached_ops() -> CachedModule:
    """Return the place of ``_C`` for this torch and these sources.

    Raises:
        RuntimeError: the package was installed without its sources.
    """
    root = source_root(MODULE)
    settings = [*toolchain.COMPILE_FLAGS, *_macros(toolchain.DEFINES)]
    key = build_key(root, [*toolchain.sources(root), *toolchain.headers(root)], settings)
    return CachedModule(cache_folder() / f"{MODULE}-torch{torch.__version__}-{key}", MODULE)


def build_ops() -> ModuleType:
    """Return the module ``_C``, from the cache or compiled now. RuntimeError: it cannot be built or
    loaded.
    """
    root = source_root(MODULE)
    return load_from_cache(cached_ops(), lambda: host_recipe(root))


def cached_kernels(wanted: Iterable[Architecture]) -> CachedModule:
    """Return the place of a ``_C_cuda`` for GPUs of the compute capabilities `wanted`.

    It may have been built for more GPUs, if it holds machine code for each of these.

    Raises:
        RuntimeError: the package was installed without its sources.
    """
    root = source_root(CUDA_MODULE)
    settings = [
        f"CUDA {torch.version.cuda}",
        *toolchain.COMPILE_FLAGS,
        *toolchain.NVCC_COMPILE_FLAGS,
        *_macros(toolchain.CUDA_DEFINES),
    ]
    key = build_key(root, [*toolchain.cuda_sources(root), *toolchain.cuda_headers(root)], settings)
    folder = cache_folder() / f"{CUDA_MODULE}-torch{torch.__version__}-cuda{torch.version.cuda}-{key}"
    targets = set(wanted)
    for path in sorted(folder.glob("sm_*")):
        module = CachedModule(path, CUDA_MODULE)
        if toolchain.runs_on(toolchain.architectures_of(path.name), targets) and module.is_complete():
            return module
    return CachedModule(folder / toolchain.name_of(targets), CUDA_MODULE)


def build_kernels(wanted: Iterable[Architecture]) -> ModuleType:
    """Return the module ``_C_cuda`` for these GPUs, from the cache or compiled now.

    Raises:
        RuntimeError: it cannot be built or loaded.
    """
    targets = set(wanted)
    root = source_root(CUDA_MODULE)
    return load_from_cache(cached_kernels(targets), lambda: cuda_recipe(root, targets))


def cached_storage_swap() -> CachedModule:
    """Return the place of ``_C_storage`` for this torch.

    Raises:
        RuntimeError: the package was installed without its sources.
    """
    settings = [*toolchain.COMPILE_FLAGS, *_macros(_storage_defines())]
    key = build_key(source_root(STORAGE_MODULE), list(toolchain.STORAGE_SOURCES), settings)
    return CachedModule(cache_folder() / f"{STORAGE_MODULE}-torch{torch.__version__}-{key}", STORAGE_MODULE)


def build_storage_swap() -> ModuleType:
    """Return the module ``_C_storage``, from the cache or compiled now. RuntimeError: it cannot be built or
    loaded."""
    root = source_root(STORAGE_MODULE)
    return load_from_cache(cached_storage_swap(), lambda: storage_recipe(root))
