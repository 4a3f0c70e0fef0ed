"""An Accelerate script that knows nothing of zero_ext: ``deepspeed_script.py OUT_FOLDER CASE...``.

Its first case trains as the launcher's configuration says. Each other one has the environment that the flags
of ``accelerate launch`` would set, or plugins of its own.
"""

import gc
import importlib.machinery
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from accelerate.utils.launch import prepare_deepspeed_cmd_env
from torch import nn

SAMPLES, CLIP = 22, 0.5


class Model(nn.Sequential):
    class config:  # where Accelerate reads the size for values "auto"
        hidden_size = 12

    def __init__(self):
        set_seed(7)
        super().__init__(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 3))


def loader():
    generator = torch.Generator().manual_seed(11)
    tensors = torch.randn(SAMPLES, 12, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=2)


def accelerator_of(**arguments):
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **arguments)


def optimizer_and_scheduler(accelerator, model, lr=1e-2):
    """What stands for the sections of the JSON, or is in the place of those that are not there."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if "optimizer" in config:
        optimizer = DummyOptim(model.parameters(), lr=lr, weight_decay=0.01)
        if "scheduler" in config:
            return optimizer, DummyScheduler(optimizer, total_num_steps=20, warmup_num_steps=2)
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=schedule_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return optimizer, schedule_of(optimizer)


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)


def train(accelerator, model, optimizer, scheduler, batches, factor=1.0):
    """An epoch: losses, gradient norms, learning rates and whether steps were skipped."""
    losses, norms, rates, skipped = [], [], [], []
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs.to(model.module[0].weight.dtype)).float(), labels)
            accelerator.backward(loss * factor)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIP))
                skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        rates.append(optimizer.param_groups[0]["lr"])
    return {"losses": losses, "norms": norms, "rates": rates, "skipped": skipped}


def train_and_save(accelerator, folder):
    """Everything that a script does with one model."""
    model = Model()
    optimization = optimizer_and_scheduler(accelerator, model)
    model, optimizer, scheduler, batches = accelerator.prepare(model, *optimization, loader())
    prepared = model, optimizer, scheduler
    found = {"first": train(accelerator, *prepared, batches)}
    accelerator.save_state(str(folder / "state"))
    found["after"] = train(accelerator, *prepared, batches)
    accelerator.load_state(str(folder / "state"))
    found["again"] = train(accelerator, *prepared, batches)
    model.eval()
    outputs = []
    for inputs, _ in batches:
        with torch.no_grad():
            outputs.append(accelerator.gather_for_metrics(model(inputs.to(model.module[0].weight.dtype))))
    found["outputs"] = torch.cat(outputs).tolist()
    values = accelerator.get_state_dict(model)
    found["weights"] = {name: value.tolist() for name, value in (values or {}).items()}
    accelerator.save_model(model, str(folder / "saved"))
    accelerator.wait_for_everyone()
    found["saved"] = sorted(path.name for path in (folder / "saved").iterdir())
    found["unwrapped"] = type(accelerator.unwrap_model(model)).__name__
    found["type"] = accelerator.distributed_type.value
    found["engine"] = type(model).__module__.partition(".")[0]
    found["freed"] = [each is None for each in accelerator.free_memory(*prepared)]
    return found


def json_of(stage, *without):
    """A JSON with values that Accelerate fills in."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 2000,
    }
    return {name: value for name, value in config.items() if name not in without}


def as_launched(folder):
    return train_and_save(accelerator_of(), folder)


def by_flags(folder, stage, precision):
    flags = ["--use_deepspeed", "--num_processes", "2", "--num_machines", "1", "--machine_rank", "0"]
    flags += ["--main_process_port", "0", "--zero_stage", stage, "--mixed_precision", precision]
    flags += ["--gradient_accumulation_steps", "2", "--gradient_clipping", str(CLIP)]
    flags += ["--zero3_save_16bit_model", "true", "script.py"]
    arguments = launch_command_parser().parse_args(flags)
    arguments.deepspeed_fields_from_accelerate_config = ""
    _, environment = prepare_deepspeed_cmd_env(arguments)
    os.environ.update({name: text for name, text in environment.items() if name.startswith("ACCELERATE_")})
    return train_and_save(accelerator_of(), folder)


def by_plugin(folder, stage, *without):
    settings = {"gradient_accumulation_steps": 2, "gradient_clipping": CLIP}
    plugin = DeepSpeedPlugin(hf_ds_config=json_of(int(stage), *without), **settings)
    return train_and_save(accelerator_of(deepspeed_plugin=plugin), folder)


def offloaded(folder):
    """Its optimizer becomes DeepSpeed's, which is not compiled here for the real one."""
    devices = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    settings = {"gradient_accumulation_steps": 2, "gradient_clipping": CLIP}
    return train_and_save(
        accelerator_of(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, **devices, **settings)), folder
    )


def overflowing(folder):
    """An epoch whose gradients are no numbers of fp16, then one whose are."""
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1)
    accelerator = accelerator_of(deepspeed_plugin=plugin, mixed_precision="fp16")
    model = Model()
    optimization = optimizer_and_scheduler(accelerator, model)
    prepared = accelerator, *accelerator.prepare(model, *optimization, loader())
    return {"first": train(*prepared, factor=1e7), "after": train(*prepared)}


def two_plugins(folder):
    """One model trains in stage 2 on the outputs of another one, which stage 3 shards."""
    config = json_of(3, "optimizer", "scheduler", "train_micro_batch_size_per_gpu")
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=json_of(2), gradient_accumulation_steps=1),
        "teacher": DeepSpeedPlugin(
            hf_ds_config={**config, "train_batch_size": 4}, gradient_accumulation_steps=1
        ),
    }
    accelerator = accelerator_of(deepspeed_plugin=plugins, mixed_precision="no")
    student, teacher = Model(), Model()
    optimization = optimizer_and_scheduler(accelerator, student)
    student, optimizer, scheduler, batches = accelerator.prepare(student, *optimization, loader())
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(teacher)
    assert accelerator.deepspeed_engine_wrapped.engine is student
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for inputs, labels in batches:
        with accelerator.accumulate(student):
            with torch.no_grad():
                wanted = teacher(inputs)
            outputs = student(inputs)
            loss = nn.functional.mse_loss(outputs, labels) + nn.functional.mse_loss(outputs, wanted)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


def two_accelerators(folder):
    """Two models train in turn, in stages 2 and 3."""
    plugins = {
        str(stage): DeepSpeedPlugin(
            hf_ds_config=json_of(stage, "optimizer", "scheduler"), gradient_accumulation_steps=1
        )
        for stage in (2, 3)
    }
    both = accelerator_of(deepspeed_plugin=plugins, mixed_precision="no"), Accelerator()
    trained = []
    for accelerator, (name, plugin) in zip(both, plugins.items(), strict=True):
        accelerator.state.select_deepspeed_plugin(name)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        model = Model()
        batches = loader()
        made = accelerator.prepare(
            model, *optimizer_and_scheduler(accelerator, model, 1e-2 * int(name)), batches
        )
        assert accelerator.deepspeed_engine_wrapped.engine is made[0]
        trained.append((accelerator, *made))
    losses = []
    for each in zip(*(batches for *_, batches in trained), strict=True):
        for (accelerator, model, optimizer, scheduler, _), batch in zip(trained, each, strict=True):
            losses += train(accelerator, model, optimizer, scheduler, [batch])["losses"]
    return {"losses": losses}


def main():
    gc.freeze()  # collections, which the libraries ask for, leave out what was imported
    out = Path(sys.argv[1])
    if hasattr(deepspeed.ops, "__compatible_ops__"):
        # The real one asks before it compiles an operator: none is to be had, so torch's own functions serve.
        deepspeed.ops.__compatible_ops__ = {}
    spec = importlib.machinery.PathFinder.find_spec("deepspeed")
    found = {"installed": spec is not None, "file": deepspeed.__file__}
    for case in sys.argv[2:]:
        name, *arguments = case.split("-")
        found[case] = globals()[name](out / case, *arguments)
        for variable in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[variable]
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        AcceleratorState._reset_state(True)
    if os.environ["RANK"] == "0":
        (out / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
