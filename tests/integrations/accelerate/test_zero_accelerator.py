"""``ZeroAccelerator``: scripts train as with Accelerator, save, resume, and refuse what sharded models do not
support."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DummyOptim,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TERecipeKwargs,
)
from torch import nn

import zero_ext
from tests.integrations.accelerate import zero_script
from tests.integrations.accelerate.zero_script import CONFIGS, HOST, STEPS, Net, made
from tests.integrations.launch import found_in, started
from tests.zero.training import distance
from zero_ext import ZeroAccelerator
from zero_ext.zero import engine_of


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote on two ranks, under ``accelerate launch`` with a configuration file."""
    folder = tmp_path_factory.mktemp("zero_accelerator")
    settings = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
    # YAML has JSON as a part.
    (folder / "accelerate.yaml").write_text(json.dumps({**settings, "mixed_precision": "no"}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", folder / "accelerate.yaml"]
    started([*launch, "--main_process_port", "0", zero_script.__file__, folder], cwd=folder)
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return found_in(out)


@pytest.fixture
def fresh() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_script_trains_as_with_accelerator(found: dict[str, Any], name: str) -> None:
    own, plain = found[f"train {name}"], found["train plain"]
    assert len(own["losses"]) == len(plain["losses"]) == 10 and len(own["norms"]) == 6
    assert min(own["norms"]) > 0.2 and own["type"] == "Net" and own["freed"]
    for key in ("losses", "norms", "outputs"):
        assert own[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-5)
    assert own["rates"] == plain["rates"] and len(set(own["rates"])) > 2
    assert distance(tensors(own["weights"]), tensors(plain["weights"])) < 1e-5


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
@pytest.mark.parametrize("case", ["no_sync", "adversaries", "trained_later", "muon"])
def test_other_loops(found: dict[str, Any], case: str, name: str) -> None:
    own, plain = found[f"{case} {name}"], found[f"{case} plain"]
    assert own.keys() == plain.keys() and len(own["losses"]) >= 5
    for key, values in plain.items():
        assert own[key] == pytest.approx(values, rel=1e-5, abs=1e-6)


def test_saved_models_are_read_by_accelerate(out: Path, found: dict[str, Any]) -> None:
    wanted = tensors(found["train plain"]["weights"])
    for folder in (out / "train stage 3", out / "train stage 3" / "pickled"):
        model = Net()
        load_checkpoint_in_model(model, str(folder))
        read = {name: value.double() for name, value in model.state_dict().items()}
        assert distance(read, wanted) < 1e-5
    assert len(list((out / "train stage 3").glob("model-0000*.safetensors"))) > 1


@pytest.mark.parametrize("name", CONFIGS)
def test_resuming_continues_bit_by_bit(found: dict[str, Any], name: str) -> None:
    own = found[f"resume {name}"]
    assert own["again"] == own["after"] and own["after"]["losses"][:STEPS] != own["first"]["losses"]
    assert own["after"]["counts"] == [STEPS, 3] and own["calls"] == [1, 1, 1, -1, -1]
    assert own["saved"] == ["checkpoint_1", "checkpoint_2"]


def test_resuming_on_another_number_of_ranks(out: Path, found: dict[str, Any], fresh: None) -> None:
    folder = out / "resume host" / "checkpoints" / "checkpoint_2"
    # A rank that was not there finds no random state of its own.
    (folder / "random_states_0.pkl").unlink()
    accelerator = ZeroAccelerator(cpu=True, gradient_accumulation_steps=STEPS, config={"stage": 1})
    model, *_ = accelerator.prepare(*made())
    custom = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], 0.5))
    accelerator.register_for_checkpointing(custom)
    accelerator.load_state(str(folder))
    assert accelerator.step == STEPS
    assert (
        distance(
            {name: value.double() for name, value in accelerator.get_state_dict(model).items()},
            tensors(found["resume host"]["weights"]),
        )
        == 0.0
    )
    assert engine_of(model).steps == 1


def test_fp16_steps_that_overflow_are_skipped(found: dict[str, Any]) -> None:
    fp16, bf16 = found["overflow fp16"], found["overflow bf16"]
    assert fp16["skipped"][0] and not fp16["skipped"][-1] and not any(bf16["skipped"])
    # The schedule waits for a step of the optimizer.
    assert fp16["rates"][0] == 1e-2 > bf16["rates"][-1]
    assert fp16["dtypes"] == ["torch.float32", "torch.float16", "fp16"]
    assert bf16["dtypes"] == ["torch.float32", "torch.bfloat16", "bf16"]
    # Elements are limited before the norm is taken: both count without the loss scale.
    assert fp16["norms"][-1] == pytest.approx(bf16["norms"][-1], rel=0.1) and fp16["norms"][-1] < 2


def test_refusals_on_all_ranks(found: dict[str, Any]) -> None:
    expected = {
        "local_sgd": "LocalSGD cannot train a sharded model",
        "second": "expected one optimizer for Net, got a second one",
        "uneven": "expected even_batches=True, got False",
        "elsewhere": "expected a folder of ZeroAccelerator.save_state with 1 model",
    }
    for name, text in expected.items():
        texts = found["refusals stage 3"][name]
        assert len(texts) == 2 and texts[0] == texts[1] and text in texts[0], texts


FSDP = {"fsdp_plugin": object.__new__(FullyShardedDataParallelPlugin)}
FP8 = object.__new__(TERecipeKwargs)
HOOK = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (FSDP, {}, "fsdp_plugin: zero_ext shards the model itself"),
        ({"deepspeed_plugin": object()}, {}, "deepspeed_plugin: starts DeepSpeed"),
        ({"megatron_lm_plugin": object()}, {}, "megatron_lm_plugin: starts Megatron-LM"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED: starts another"),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP: starts another"),
        ({"mixed_precision": "fp8"}, {}, "mixed_precision: expected one of 'no', 'bf16', 'fp16', got 'fp8'"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "fp8"}, "got 'fp8'"),
        ({"kwargs_handlers": [FP8]}, {}, "TERecipeKwargs: starts fp8"),
        ({"kwargs_handlers": [GradScalerKwargs()]}, {}, "Set loss_scale in config="),
        ({"kwargs_handlers": [HOOK]}, {}, "comm_hook='fp16'"),
        ({"dynamo_backend": "inductor"}, {}, "dynamo_backend: compiles the whole model"),
        (
            {"mixed_precision": "bf16", "config": {"precision": {"dtype": "fp16"}}},
            {},
            "config has 'fp16', mixed_precision is 'bf16'",
        ),
        (
            {"mixed_precision": "no", "config": {"precision": {"dtype": "bf16"}}},
            {},
            "config has 'bf16', mixed_precision is 'no'",
        ),
        (
            {"gradient_accumulation_steps": 1, "config": {"batch": {"gradient_accumulation_steps": 4}}},
            {},
            "config has 4, gradient_accumulation_steps is 1",
        ),
        ({"config": {"checkpoint": {"keep_last": 2}}}, {}, "ProjectConfiguration(total_limit=...)"),
        ({"config": {"optimizer": {"type": "AdamW"}}}, {}, "passes its optimizer to accelerator.prepare"),
        ({"config": {"stages": 3}}, {}, "stages"),
    ],
)
def test_arguments_that_are_refused(
    arguments: dict[str, Any],
    environment: dict[str, str],
    text: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as raised:
        ZeroAccelerator(**arguments)
    assert text in str(raised.value)
    assert AcceleratorState._shared_state == {}, "Accelerate's state was touched"


def test_an_accelerate_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.__version__", "1.9.3")
    with pytest.raises(ImportError, match=r"expected version 1\.10 or newer, got 1\.9\.3"):
        ZeroAccelerator()


def spread(model: nn.Module) -> None:
    model.hf_device_map = {"0": 0, "1": "cpu"}  # type: ignore[assignment]


def in_8_bits(model: nn.Module) -> None:
    model.is_loaded_in_8bit = True  # type: ignore[assignment]


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for model in models for each in model.parameters()])


@pytest.mark.parametrize(
    ("objects", "text"),
    [
        (lambda model: (model, adam(model), adam(model)), "expected one optimizer for Net, got a second"),
        (lambda model: (model, adam(nn.Linear(2, 2))), "the parameters of Adam in one model, got none"),
        (
            lambda model: (model, other := nn.Linear(2, 2), adam(model, other)),
            "the parameters of Adam in one model, got Net, Linear",
        ),
        (lambda model: (model, DummyOptim(model.parameters())), "got a DummyOptim, which is DeepSpeed's"),
        (lambda model: (spread(model), model), "got one spread by device_map"),
        (lambda model: (torch.compile(model), adam(model)), "got one that is compiled as a whole"),
        (lambda model: (in_8_bits(model), model, adam(model)), "got one loaded in 8 bits"),
        (
            lambda model: (model, adam(model), other := nn.Linear(2, 2), adam(other)),
            "loss_scale: expected a static scale for 2 models in fp16",
        ),
    ],
)
def test_objects_that_are_refused(objects: Callable[[nn.Module], Any], text: str, fresh: None) -> None:
    model, accelerator = Net(), ZeroAccelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(ValueError) as raised:
        accelerator.prepare(*objects(model))
    assert text in str(raised.value)
    assert accelerator._models == [] and next(model.parameters()).dtype == torch.float32, "it was touched"
    assert not hasattr(model, "_zero_ext_engine")


def test_calls_that_are_refused(tmp_path: Path, fresh: None) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = ZeroAccelerator(cpu=True, mixed_precision="fp16", project_config=project)
    with pytest.raises(ValueError, match="expected a checkpoint to load, got none"):
        accelerator.load_state()
    model, optimizer, _, batches = made()
    model, batches = accelerator.prepare(model, batches)
    inputs, _ = next(iter(batches))
    with pytest.raises(RuntimeError, match="backward: expected a prepared optimizer, got none"):
        accelerator.backward(model(inputs).sum())
    optimizer = accelerator.prepare(optimizer)
    with pytest.raises(RuntimeError, match="expected gradients without a loss scale"):
        accelerator.unscale_gradients()
    with pytest.raises(ValueError, match="expected all parameters that one model trains"):
        accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0)
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(RuntimeError, match=r"expected \[1\], with which the models were prepared, got 3"):
        accelerator.backward(model(inputs).sum())


def test_a_checkpoint_of_other_models_changes_nothing(out: Path, fresh: None) -> None:
    folder = str(out / "resume stage 2" / "checkpoints" / "checkpoint_2")
    accelerator = ZeroAccelerator(cpu=True, config={"stage": 2})
    model, _, other, _ = accelerator.prepare(net := Net(), adam(net), two := nn.Linear(2, 2), adam(two))
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with pytest.raises(ValueError, match=r"2 model\(s\), got one of another number of models"):
        accelerator.load_state(folder)
    # A checkpoint of another program has the same name.
    zero_ext.save_checkpoint(out / "foreign" / "zero_ext", model).wait()
    zero_ext.save_checkpoint(out / "foreign" / "zero_ext_1", other).wait()
    with pytest.raises(ValueError, match="got a checkpoint of another program"):
        accelerator.load_state(str(out / "foreign"))
    after = accelerator.get_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_settings_come_from_arguments_configuration_and_launcher(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ZERO_EXT_CONFIG", "stage=2 batch.gradient_accumulation_steps=3")
    accelerator = ZeroAccelerator(cpu=True)
    config = accelerator.config
    assert (config.stage, config.precision.dtype, config.batch.gradient_accumulation_steps) == (2, "bf16", 3)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.state.mixed_precision == "no"
    monkeypatch.delenv("ZERO_EXT_CONFIG")
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    accelerator = ZeroAccelerator(
        True, dataloader_config=DataLoaderConfiguration(), gradient_accumulation_steps=5, config=deepspeed
    )
    config = accelerator.config
    assert (config.stage, config.precision.dtype, config.offload.optimizer) == (2, "bf16", HOST["optimizer"])
    assert config.batch.gradient_accumulation_steps == 5
    assert isinstance(accelerator, Accelerator) and accelerator.is_main_process
