"""What needs one process: optimizers, schedules, files, estimates, configuration models, monitors."""

from __future__ import annotations

import csv
import secrets
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import zero_ext
from zero_ext.config import ActivationCheckpointingConfig, ConfigError
from zero_ext.integrations import deepspeed
from zero_ext.integrations.deepspeed import deepspeed_checkpointing
from zero_ext.integrations.deepspeed.checkpoint_io.checkpoint_weights import clone_tensors_for_torch_save
from zero_ext.integrations.deepspeed.deepspeed_checkpointing import _Configured
from zero_ext.integrations.deepspeed.deepspeed_config import DeepSpeedZeroConfig
from zero_ext.integrations.deepspeed.import_alias import DeepSpeedFeatureError
from zero_ext.plan import TrainingState, model_state_bytes


def test_optimizers_are_torchs() -> None:
    model = nn.Linear(3, 2)
    ops = deepspeed.ops
    made = ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=0.1, weight_decay=0.2, adamw_mode=False)
    assert type(made) is torch.optim.Adam and made.defaults["weight_decay"] == 0.2
    assert type(ops.adam.FusedAdam(model.parameters())) is torch.optim.AdamW
    assert ops.adam.FusedAdam(model.parameters()).defaults["weight_decay"] == 0.0
    assert type(ops.lion.DeepSpeedCPULion(model.parameters())) is zero_ext.Lion
    assert ops.lion.FusedLion(model.parameters()).defaults["betas"] == (0.9, 0.99)
    assert type(ops.adagrad.DeepSpeedCPUAdagrad(model.parameters())) is torch.optim.Adagrad
    # Schedulers over the optimizer that was there first keep driving the groups.
    first = torch.optim.AdamW(model.parameters(), lr=0.5)
    second = ops.adam.DeepSpeedCPUAdam(first.param_groups, lr=0.5)
    first.param_groups[0]["lr"] = 0.25
    assert second.param_groups[0]["lr"] == 0.25
    for wrong in ({"bias_correction": False}, {"fp32_optimizer_states": False}):
        with pytest.raises(DeepSpeedFeatureError, match=next(iter(wrong))):
            ops.adam.DeepSpeedCPUAdam(model.parameters(), **wrong)
    lamb = ops.lamb.FusedLamb(model.parameters(), lr=0.1, eps_inside_sqrt=True, max_coeff=0.3, min_coeff=0.08)
    assert type(lamb) is zero_ext.Lamb
    names = ("lr", "eps_inside_sqrt", "max_coeff", "min_coeff")
    assert [lamb.defaults[name] for name in names] == [0.1, True, 0.3, 0.08]
    for refused in ({"max_grad_norm": 1.0}, {"amsgrad": True}):
        with pytest.raises(DeepSpeedFeatureError, match=f"FusedLamb.*{next(iter(refused))}"):
            ops.lamb.FusedLamb(model.parameters(), **refused)


def test_files(tmp_path: Path) -> None:
    handle = deepspeed.ops.aio.AsyncIOBuilder().load().aio_handle(4096, 8, False, True, 2)
    asked = (handle.get_block_size, handle.get_queue_depth, handle.get_intra_op_parallelism)
    assert [ask() for ask in asked] == [4096, 8, 2]
    torch.manual_seed(secrets.randbits(31))
    tensors = [torch.randn(3000), torch.randn(17), torch.randn(5000)]
    offsets = [0, 12_000, 12_068]
    path = str(tmp_path / "values")
    for source, offset in zip(tensors, offsets, strict=True):
        assert handle.async_pwrite(source, path, offset) == 0
    assert handle.wait() == 3 and handle.wait() == 0
    buffer = torch.full((8017,), float("nan"))
    assert handle.sync_pread(buffer, path) == 1
    assert torch.equal(buffer, torch.cat(tensors))
    middle = handle.new_cpu_locked_tensor(17, buffer)
    assert handle.async_pread(middle, path, 12_000) == 0 and handle.wait() == 1
    assert torch.equal(middle, tensors[1])
    with pytest.raises(RuntimeError, match="expected 32068 bytes from offset 4 on, got 32064"):
        handle.read(buffer, path, file_offset=4)
    with pytest.raises(RuntimeError, match="no-such-folder"):
        handle.write(buffer, str(tmp_path / "no-such-folder" / "x"))
    with pytest.raises(DeepSpeedFeatureError, match="Pass the path"):
        handle.async_pwrite(buffer, 3)


def test_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    total, ranks = 7_500_000_000, 16
    bytes_of_rank = model_state_bytes(3, ranks, TrainingState(trainable={"bf16": total}))
    host, device, layer = deepspeed.zero.estimate_zero3_model_states_mem_needs(
        total, 10**8, 8, 2, cpu_offload=False, cpu_offload_params=False
    )
    assert (host, device, layer) == (0, bytes_of_rank.total + 4 * 10**8, 4 * 10**8)
    host, device, _ = deepspeed.zero.estimate_zero3_model_states_mem_needs(total, 10**8, 8, 2)
    assert (host, device) == (8 * bytes_of_rank.total, 4 * 10**8)
    second = model_state_bytes(2, ranks, TrainingState(trainable={"bf16": total}))
    host, device = deepspeed.zero.estimate_zero2_model_states_mem_needs(total, 8, 2)
    assert device == second.params and host == max(8 * (second.optimizer + second.grads), 4 * total * 8)
    deepspeed.zero.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1000, 1000), 2)
    text = capsys.readouterr().out
    assert "1.0M parameters, largest layer 1.0M on 1 node(s) of 2 GPU(s)" in text
    assert text.count("zero_init=1") == 3 and "offload_param=cpu , offload_optimizer=cpu" in text
    deepspeed.zero.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(10, 10))
    assert capsys.readouterr().out.count("offload_optimizer") == 2


def test_configuration_models() -> None:
    settings = {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}},
    }
    config = deepspeed.DeepSpeedConfig(settings)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 8)
    assert config.bfloat16_enabled and not config.fp16_enabled and config.zero_enabled
    assert config.zero_config.offload_optimizer.device == "cpu" and config.zero_config.sub_group_size == 10**9
    assert config.scheduler_name == "WarmupLR" and config.optimizer_name is None
    assert DeepSpeedZeroConfig(stage=3, stage3_max_live_parameters=5).max_live_parameters == 5
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="train_batch_sise"):
        deepspeed.DeepSpeedConfig({"train_batch_sise": 8})
    assert deepspeed.DeepSpeedConfigError is ConfigError
    with pytest.raises(ValueError, match="stag"):
        DeepSpeedZeroConfig(stag=3)


def test_schedules() -> None:
    schedules = deepspeed.runtime.lr_schedules
    assert all(getattr(schedules, name).__name__ == name for name in schedules.VALID_LR_SCHEDULES)
    section = {"type": "OneCycle", "params": {"cycle_max_lr": 0.3}}
    assert schedules.get_lr_from_config(section) == (0.3, "")
    assert schedules.get_lr_from_config({"type": "OneCycle"})[0] is None


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """The module is afterwards as it was: its checkpoint follows the model's configuration."""
    with mock.patch.object(deepspeed_checkpointing, "_CONFIGURED", _Configured()):
        yield


@pytest.mark.usefixtures("unconfigured")
def test_activation_checkpointing() -> None:
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(None, {"activation_checkpointing": {"number_checkpoints": 4}}, profile=True)
    assert checkpointing.is_configured()
    torch.manual_seed(secrets.randbits(31))
    block, inputs = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()), torch.randn(4, 6)
    gradients = []
    for run in (block, lambda x: checkpointing.checkpoint(block, x)):
        torch.manual_seed(1)
        block.zero_grad()
        run(inputs).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in block.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)
    with pytest.raises(ValueError, match=r"expected mpu_ with partition_activations=True"):
        checkpointing.configure(None, {"activation_checkpointing": {"partition_activations": True}})
    on_host = {"activation_checkpointing": {"cpu_checkpointing": True}}
    checkpointing.configure(None, on_host, checkpoint_in_cpu=False)
    assert deepspeed_checkpointing._CONFIGURED.checkpointing.config == ActivationCheckpointingConfig()
    with pytest.raises(TypeError, match="no_such"):
        checkpointing.configure(no_such=True)


class ModelParallel:
    """The only rank of a model-parallel group, third of its kind."""

    def get_model_parallel_rank(self) -> int:
        return 2


@pytest.mark.usefixtures("unconfigured")
def test_where_checkpoints_wait_and_which_random_numbers_they_see() -> None:
    checkpointing = deepspeed.checkpointing
    settings = {"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "num_checkpoints": 1}
    checkpointing.configure(ModelParallel(), **settings, profile=True)
    checkpointing.set_num_layers(3)
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = checkpointing.get_cuda_rng_tracker()
    assert isinstance(tracker, checkpointing.CudaRNGStatesTracker)
    inputs = torch.randn(64, 64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            return x * torch.rand(64, 64)

    hidden = inputs
    for _ in range(3):
        hidden = checkpointing.checkpoint(dropped, hidden * 1)
    made = deepspeed_checkpointing._CONFIGURED.checkpointing
    assert made.used_bytes() == 3 * inputs.nbytes == made.allocated_bytes()["host"]
    hidden.sum().backward()
    generator = torch.Generator().manual_seed(7 + 2718 + 2)
    factors = [torch.rand(64, 64, generator=generator) for _ in range(3)]
    assert torch.allclose(inputs.grad, factors[0] * factors[1] * factors[2])
    checkpointing.model_parallel_reconfigure_tp_seed(9)
    with tracker.fork():
        assert torch.equal(torch.rand(3), torch.rand(3, generator=generator.manual_seed(9 + 2718 + 2)))
    with pytest.raises(ValueError, match="number_checkpoints"):
        checkpointing.configure(contiguous_checkpointing=True)
    checkpointing.configure()
    checkpointing.reset()


def test_monitors(tmp_path: Path) -> None:
    sections = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    master = deepspeed.monitor.MonitorMaster(sections)
    assert master.enabled and not master.tb_monitor.enabled and not master.wandb_monitor.enabled
    master.write_events([("Train/loss", 0.5, 1), ("Train/lr", 1e-3, 1)])
    master.write_events([("Train/loss", torch.tensor(0.25), 2)])
    with (tmp_path / "job" / "Train_loss.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["1", "0.5"], ["2", "0.25"]]
    assert not deepspeed.monitor.MonitorMaster({}).enabled


def test_accelerator_and_small_things() -> None:
    accelerator = deepspeed.get_accelerator()
    assert accelerator is deepspeed.accelerator.get_accelerator()
    assert accelerator.is_available() and accelerator.device_count() >= 1
    assert torch.device(accelerator.current_device_name()).type == accelerator.type
    assert accelerator.on_accelerator(torch.zeros(1, device=accelerator.device_name()))
    assert 0 < accelerator.memory_allocated() < accelerator.total_memory()
    with accelerator.stream(accelerator.current_stream()):
        accelerator.synchronize()
    assert torch.float32 in accelerator.supported_dtypes()
    with pytest.raises(AttributeError, match="no 'no_such'"):
        accelerator.no_such()
    assert deepspeed.accelerator.is_current_accelerator_supported()
    assert accelerator.HalfTensor([1.0]).dtype is torch.float16
    assert accelerator.memory_cached() > 0 and accelerator.lazy_call(lambda: 7) in (7, None)
    assert accelerator.create_op_builder("AsyncIOBuilder").NAME == "async_io"
    with pytest.raises(DeepSpeedFeatureError, match=r"CPUAdamBuilder.*nothing has to be built"):
        accelerator.create_op_builder("CPUAdamBuilder")
    operators = deepspeed.ops.__compatible_ops__
    assert operators["async_io"] and not operators["evoformer_attn"]
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        built = nn.Linear(4, 4)
    assert built.weight.is_meta and built.weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="no batches"):
        next(deepspeed.utils.RepeatingLoader([]))
    view = torch.zeros(100)[:2]
    copied = clone_tensors_for_torch_save({"a": [view], "b": 3})
    assert copied["b"] == 3 and copied["a"][0].untyped_storage().nbytes() == 8


def test_tiled_linear() -> None:
    torch.manual_seed(secrets.randbits(31))
    plain = nn.Linear(10, 7)
    tiled = deepspeed.zero.TiledLinear(10, 7, in_splits=3, out_splits=2, init_linear=plain)
    inputs = torch.randn(5, 10)
    torch.testing.assert_close(tiled(inputs), plain(inputs))
    with pytest.raises(DeepSpeedFeatureError, match="combine_out_splits=False"):
        deepspeed.zero.TiledLinear(10, 7, combine_out_splits=False)
