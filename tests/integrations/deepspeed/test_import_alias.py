"""``import deepspeed`` under the look-alike: what is found, what is refused, and that a real one is left
alone."""

from __future__ import annotations

from tests.integrations.launch import printed_by

PROGRAM = """
import importlib, importlib.metadata, importlib.util, json, sys
from zero_ext.integrations.deepspeed import import_alias
before = "deepspeed" in sys.modules
import_alias.activate(); import_alias.activate()
light = "torch.distributed.pipelining" not in sys.modules  # which takes a second
from zero_ext.integrations import deepspeed as package
from zero_ext.integrations.deepspeed.name_registry import mirrors_of, names
modules = {name: importlib.import_module(name) for name in names().modules}
same = [module is import_alias.module_for(name) for name, module in modules.items()]
same += [modules["deepspeed"] is package, modules["deepspeed.runtime.zero"] is package.zero]
specs = [each.__spec__.name == name for name, each in modules.items() if each is not package]
specs += [package.__spec__.name == package.__name__]
here = {mirror for name in modules for mirror in mirrors_of(name)}
mirrors = [importlib.import_module(each).__doc__ for each in here]
import deepspeed
from deepspeed.runtime.zero import partition_parameters
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed import DualPipeVModule, moe
from deepspeed import PipelineEngine, PipelineModule
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine as same_engine
from deepspeed.runtime.pipe.module import PipelineModule as same_module
pipelines = PipelineEngine is same_engine and PipelineModule is same_module
errors = {}
from deepspeed.moe.layer import MoE
for line in ("MoE(8)", "import deepspeed.nothing", "DualPipeVModule()", "deepspeed.init_inference(None)"):
    try:
        exec(line)
    except Exception as error:
        errors[line] = f"{type(error).__mro__[-5:-2]} {error}"
from transformers.integrations.deepspeed import is_deepspeed_available
from accelerate.utils import is_deepspeed_available as accelerates
names = [each.metadata["Name"] for each in importlib.metadata.distributions() if each.metadata["Name"]]
print(json.dumps({"before": before, "same": all(same), "specs": all(specs),
    "mirrors": len(mirrors) * all(mirrors),
    "errors": errors,
    "pipelines": light and pipelines,
    "finders": sum(type(f).__name__ == "Finder" for f in sys.meta_path),
    "available": [is_deepspeed_available(), accelerates()],
    "spec": importlib.util.find_spec("deepspeed.zero") is not None,
    "none": importlib.util.find_spec("deepspeed.nothing") is None,
    "version": importlib.metadata.version("deepspeed"), "torch": importlib.metadata.version("torch"),
    "listed": "deepspeed" in names}))
"""


def test_every_module_is_found_under_its_second_name() -> None:
    found = printed_by(PROGRAM)
    assert not found["before"] and found["finders"] == 1
    assert found["available"] == [True, True] and found["spec"] and found["none"] and found["listed"]
    assert found["version"] == "0.19.8" and found["torch"].startswith("2.")
    errors = found["errors"]
    assert "MixtureOfExperts" in errors["MoE(8)"]
    assert found["pipelines"] and found["same"] and found["specs"] and found["mirrors"] > 10
    assert "No module named 'deepspeed.nothing'" in errors["import deepspeed.nothing"]
    assert "deepspeed.DualPipeVModule" in errors["DualPipeVModule()"]
    assert "zero_ext.prepare(model, None" in errors["deepspeed.init_inference(None)"]


def test_nothing_is_active_unless_asked() -> None:
    found = printed_by(
        "import zero_ext, sys, json\n"
        "from zero_ext.integrations import deepspeed as ours\n"
        "import deepspeed as theirs, importlib.metadata as m\n"
        "try:\n    from zero_ext.integrations.deepspeed.import_alias import activate\n"
        "    activate(); error = ''\n"
        "except RuntimeError as e: error = str(e)\n"
        "print(json.dumps({'file': theirs.__file__, 'same': theirs is ours, 'error': error,"
        "'engine': theirs.DeepSpeedEngine.__module__, 'real': hasattr(theirs, 'PipelineModule')}))"
    )
    assert "site-packages/deepspeed/" in found["file"] and not found["same"]
    assert found["engine"] == "deepspeed.runtime.engine"
    assert "got one that has imported it from" in found["error"]
    assert "zero-ext run --deepspeed-compat" in found["error"]
