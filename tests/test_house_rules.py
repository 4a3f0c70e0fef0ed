"""Rules of the house that would drift if nothing held them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import torch

from tests.ops.test_opcheck import SAMPLES
from zero_ext.ops.load_library import FAKE_KERNELS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zero_ext"
SOURCE_FOLDERS = ("zero_ext", "csrc", "tests", "benchmarks", "examples", "scripts")
LINES_OF_A_FILE = 500
LINES_OF_A_FUNCTION = 60
ARGUMENTS_OF_A_FUNCTION = 9

# One argument for each key of the JSON section it is built from, under the key's own name.
ONE_ARGUMENT_PER_JSON_KEY = {
    "zero_ext/optim/fused_optimizers.py: __init__",
    "zero_ext/optim/full_tensors/muon.py: __init__",
    "zero_ext/optim/one_bit.py: __init__",
    "zero_ext/optim/schedulers.py: __init__",
}
# One for each choice of the user that does not depend on the others.
ONE_ARGUMENT_PER_CHOICE = {
    "zero_ext/activation/chunked_cross_entropy.py: linear_cross_entropy",
    "zero_ext/zero/api/prepare.py: prepare",
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_core_includes_no_torch_and_no_python_header() -> None:
    files = [path for path in (ROOT / "csrc" / "core").rglob("*") if path.suffix in {".h", ".cpp", ".cuh"}]
    assert len(files) > 10
    pattern = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|caffe2|Python\.h|pybind11|.*\bops/)')
    assert [path.name for path in files if pattern.search(path.read_text())] == []


PYDANTIC = {"pydantic", "pydantic_core", "typing_inspection", "annotated_types"}


def registered_ops() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("zero_ext::")}


def test_every_op_has_a_fake_kernel_and_an_opcheck() -> None:
    ops = registered_ops()
    assert "adam_step_" in ops
    schemas = {name: getattr(torch.ops.zero_ext, name).default._schema for name in ops}
    with_tensors = {name for name in ops if any("Tensor" in str(each.type) for each in schemas[name].returns)}
    assert with_tensors == set(FAKE_KERNELS), (
        "every op that returns a tensor needs a @fake_kernel in zero_ext/ops, imported by its __init__.py"
    )
    returned = {str(each.type) for name in ops - with_tensors for each in schemas[name].returns}
    assert returned <= {"int", "str", "bool"}, "load_library.py has no fake for what another op returns"
    text = "".join(path.read_text() for path in python_files("tests"))
    checked = set(SAMPLES) | set(re.findall(r"opcheck\(\s*torch\.ops\.zero_ext\.(\w+)", text))
    assert ops <= checked, "every op needs a sample in tests/ops/test_opcheck.py, or an opcheck of its own"


def output_of(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_import_is_small_compiles_nothing_and_starts_no_cuda() -> None:
    """Beyond torch it takes this package's modules, pydantic and the standard library. The torch here says
    that it has CUDA."""
    code = (
        "import sys\n"
        "import torch, torch.distributed\n"
        "torch.version.cuda = '13.0'\n"
        "before = set(sys.modules)\n"
        "import zero_ext\n"
        "zero_ext.prepare, zero_ext.initialize, zero_ext.save_checkpoint\n"
        "if torch.cuda.is_initialized(): raise SystemExit('importing zero_ext started CUDA')\n"
        "if 'zero_ext.ops.jit.jit_build' in sys.modules: raise SystemExit('the import may have compiled')\n"
        "print(*set(sys.modules) - before)\n"
    )
    modules = [module.partition(".")[0] for module in output_of(code).split()]
    others = set(modules) - sys.stdlib_module_names - {"zero_ext"}
    assert {each for each in others if not each.startswith("_")} <= PYDANTIC
    assert 100 < modules.count("zero_ext") < 220


def test_the_command_line_plans_without_torch() -> None:
    """A plan is there in a moment: torch alone takes longer to import than all else takes together."""
    code = (
        "import sys\n"
        "from zero_ext.cli.plan_command import PlanOptions, plan_of\n"
        "import zero_ext.cli.plan_report, zero_ext.plan.planner, zero_ext.plan.tune\n"
        "if plan_of(PlanOptions('1t', gpus=16)).entries == (): raise SystemExit('no plan')\n"
        "if 'torch' in sys.modules: raise SystemExit('planning imported torch')\n"
        "print(0)\n"
    )
    assert int(output_of(code)) == 0


def test_public_names_are_there_when_they_are_asked_for() -> None:
    code = (
        "import zero_ext, zero_ext.plan, zero_ext.plan.simulation\n"
        "for module in (zero_ext, zero_ext.plan, zero_ext.plan.simulation):\n"
        "    for name in module.__all__: getattr(module, name)\n"
        "    if hasattr(module, 'no_such_name'): raise SystemExit('found')\n"
        "zero_ext.zero.engine_of, zero_ext.ops.adam_step_, zero_ext.checkpoint.CheckpointError\n"
        "print(0)\n"
    )
    assert int(output_of(code)) == 0


def test_no_assert_no_pickle_and_no_unfinished_work_in_the_library() -> None:
    offenders = []
    for path in python_files("zero_ext"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno} assert")
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(
                name.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"} for name in names
            ):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno} {names}")
            if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno} NotImplementedError")
    assert offenders == []


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def argument_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in {"self", "cls"}])


def test_files_and_functions_stay_small() -> None:
    offenders = []
    for folder in SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".cpp", ".h", ".cu", ".cuh", ".sh"}:
                lines = len(path.read_text().splitlines())
                if lines > LINES_OF_A_FILE:
                    offenders.append(f"{path.relative_to(ROOT)}: {lines} lines")
    for path in python_files("zero_ext"):
        for function in functions(path):
            label = f"{path.relative_to(ROOT)}: {function.name}"
            if body_lines(function) > LINES_OF_A_FUNCTION:
                offenders.append(f"{label} has {body_lines(function)} lines")
            exempt = ONE_ARGUMENT_PER_JSON_KEY | ONE_ARGUMENT_PER_CHOICE
            if argument_count(function) > ARGUMENTS_OF_A_FUNCTION and label not in exempt:
                offenders.append(f"{label} has {argument_count(function)} arguments")
    assert offenders == []


def test_every_module_says_what_it_is() -> None:
    files = python_files("zero_ext", "tests")
    silent = [
        path
        for path in files
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


def test_no_unfinished_marks() -> None:
    offenders = []
    for path in python_files(*SOURCE_FOLDERS):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
                    offenders.append(f"{path.relative_to(ROOT)}:{token.start[0]}")
    assert offenders == []


MAKERS = {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange", "rand", "randn"}


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """Users may set torch's default device; what the library makes for itself is not meant."""
    offenders = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            by_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if by_torch and node.func.attr in MAKERS and all(key.arg != "device" for key in node.keywords):
                offenders.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert offenders == []
