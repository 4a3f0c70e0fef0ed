"""Training with ZeroTrainer: the loss curves of the plain Trainer, under every stage, tier and argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

import zero_ext
from tests.integrations.transformers.models import (
    Sentences,
    arguments,
    column,
    enter,
    fitted,
    gpt2,
    largest_difference,
    llama,
)
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import distance
from zero_ext.integrations.transformers import ZeroTrainer, ZeroTrainerMixin
from zero_ext.zero import engine_of

HOST = {"params": "host", "grads": "host", "optimizer": "host"}
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "host": {"stage": 3, "offload": HOST},
    "nvme": {"stage": 3, "offload": dict.fromkeys(HOST, "nvme")},
}


def with_storage(config: dict[str, Any], path: Any) -> dict[str, Any]:
    """``config``, its storage in ``path`` if it has any."""
    tiers = config.get("offload", {})
    if "nvme" not in tiers.values():
        return config
    return {**config, "offload": {**tiers, "nvme_paths": [str(path)]}}


def assert_alike(trainer: Any, plain: Any, name: str, rounding: float = 0.0) -> None:
    """Losses, norms and rates of the steps are those of the plain trainer, norms within ``rounding`` too."""
    assert largest_difference(column(trainer, "loss"), column(plain, "loss")) < 1e-5, name
    norms = largest_difference(column(trainer, "grad_norm"), column(plain, "grad_norm"))
    assert norms < max(1e-4, rounding), name
    assert column(trainer, "learning_rate") == column(plain, "learning_rate")


def effect_of_rounding(plain: Any, model: Any, folder: Any, data: Sentences, **settings: Any) -> float:
    """How much norms of the plain trainer change if one weight does by its last bits. In some steps little
    else than rounding decides about a sample's gradients."""
    with torch.no_grad():
        model.transformer.wte.weight[3:].mul_(1 + 2**-22)
    shaken = fitted(Trainer, model, folder, data, **settings)
    return largest_difference(column(shaken, "grad_norm"), column(plain, "grad_norm"))


class Ragged(Sentences):
    """Sentences without what is not to be learnt, so of several lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[: self.lengths[index]] for name, values in super().__getitem__(index).items()}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of ``Ragged`` samples."""
    pads = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([each[name] for each in samples], True, pad)
        for name, pad in pads.items()
    }
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


# Arguments that change the data or the losses, and what is logged because of them.
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"neftune_noise_alpha": 5.0}, "loss"),
    ({"train_sampling_strategy": "group_by_length"}, "loss"),
    ({"average_tokens_across_devices": False}, "loss"),
    ({"include_num_input_tokens_seen": "all"}, "num_input_tokens_seen"),
    ({"include_num_input_tokens_seen": "non_padding"}, "num_input_tokens_seen"),
    ({"eval_on_start": True}, "eval_loss"),
]


@on_ranks(2)
def test_arguments_that_change_data_and_losses_act_as_in_the_plain_trainer(world: World) -> None:
    enter(world)
    settings = {"max_steps": 3, "seed": world.seed % 1000, "gradient_accumulation_steps": 2}
    data, more = Ragged(60, world.seed), {"data_collator": padded, "eval_dataset": Ragged(8, world.seed + 1)}
    folder = world.shared_folder()

    def run(kind: Any, changes: dict[str, Any], **zero: Any) -> Any:
        args = arguments(folder, **settings, **changes)
        trainer = kind(model=llama(world.seed), args=args, train_dataset=data, **more, **zero)
        trainer.train()
        return trainer

    without = run(Trainer, {})
    for changes, logged in ARGUMENTS:
        plain, trainer = run(Trainer, changes), run(ZeroTrainer, changes, zero_config={"stage": 3})
        assert_alike(trainer, plain, str(changes))
        wanted = column(plain, logged)
        assert largest_difference(column(trainer, logged), wanted) < 1e-5, changes
        assert wanted != column(without, logged), changes  # so the argument has had an effect


@on_ranks(2)
def test_compiled_layers_have_the_losses_of_plain_ones(world: World) -> None:
    enter(world)
    settings = {"max_steps": 4, "seed": world.seed % 1000}
    data = Sentences(40, world.seed)
    folder = world.shared_folder()
    plain = fitted(ZeroTrainer, llama(world.seed), folder, data, {"stage": 3}, **settings)
    torch._dynamo.reset()
    counters.clear()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compiled = fitted(ZeroTrainer, llama(world.seed), folder, data, {"stage": 3}, **settings, **options)
    assert_alike(compiled, plain, "compiled")
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"], counters


@on_ranks(2)
def test_fifty_steps_have_the_losses_of_the_plain_trainer_under_ddp(world: World) -> None:
    enter(world)
    settings = {"max_steps": 50, "seed": world.seed % 1000}
    data = Sentences(90, world.seed)
    folder = world.shared_folder()
    made = gpt2(world.seed)  # it has dropout: random numbers must be drawn alike
    plain = fitted(Trainer, made, folder, data, **settings)
    wanted = column(plain, "loss")
    assert len(wanted) == 50 and sum(wanted[-10:]) < sum(wanted[:10])
    rounding = 10 * effect_of_rounding(plain, gpt2(world.seed), folder, data, **settings)
    assert rounding < 0.1
    for name, config in CASES.items():
        model = gpt2(world.seed)
        trainer = fitted(ZeroTrainer, model, folder, data, with_storage(config, folder), **settings)
        assert_alike(trainer, plain, name, rounding)
        assert distance(zero_ext.full_state_dict(model), made.state_dict()) < 1e-4, name


@on_ranks(2)
def test_accumulation_checkpointing_smoothing_clipping_and_schedule_combined(world: World) -> None:
    enter(world)
    settings = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 3,
        "gradient_checkpointing": True,  # its name in every supported release
        "label_smoothing_factor": 0.1,
        "max_grad_norm": 0.7,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
    }
    data = Sentences(44, world.seed)  # 11 micro-batches an epoch: its last step has two
    moved = {"tier": "host", "min_offload_bytes": 0}
    cases = {name: config for name, config in CASES.items() if "offload" not in config}
    cases["in backward"] = {"stage": 3, "offload": {**HOST, "update_mode": "in_backward"}}
    cases["checkpoints on the host"] = {"stage": 3, "activation_checkpointing": moved}
    folder = world.shared_folder()
    plain = fitted(Trainer, llama(world.seed), folder, data, **settings)
    assert len(column(plain, "loss")) == 8
    assert max(column(plain, "grad_norm")) > 0.7  # and so was clipped
    for name, config in cases.items():
        trainer = fitted(ZeroTrainer, llama(world.seed), folder, data, config, **settings)
        assert_alike(trainer, plain, name)
        assert trainer.zero_config.gradient_clipping == 0.7
        held = engine_of(trainer.model).checkpointing.allocated_bytes()["host"]
        assert (held > 0) == ("activation_checkpointing" in config)


@on_ranks(1, 2)
def test_without_clipping_the_norm_is_logged_all_the_same(world: World) -> None:
    enter(world)
    settings = {"max_steps": 3, "max_grad_norm": 0.0}
    data = Sentences(24, world.seed)
    folder = world.shared_folder()
    plain, trainer = (
        fitted(kind, llama(world.seed), folder, data, **settings) for kind in (Trainer, ZeroTrainer)
    )
    assert trainer.zero_config.gradient_clipping == 0 and trainer.zero_config.stage == 3
    assert largest_difference(column(trainer, "grad_norm"), column(plain, "grad_norm")) < 1e-5


@on_ranks(2)
def test_half_precision_has_master_weights_and_loss_scaling(world: World) -> None:
    enter(world)
    data = Sentences(40, world.seed)
    folder = world.shared_folder()
    wanted = column(fitted(Trainer, llama(world.seed), folder, data, max_steps=12), "loss")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = {}
        for stage in (1, 3):
            model = llama(world.seed)
            run = {"max_steps": 12, name: True}
            trainer = fitted(ZeroTrainer, model, folder, data, {"stage": stage}, **run)
            found[stage] = column(trainer, "loss")
            assert trainer.zero_config.precision.dtype == name
            assert next(model.parameters()).dtype == dtype
        assert found[1] == found[3]
        assert largest_difference(found[3], wanted) < 0.03, name


@on_ranks(2)
def test_a_step_that_overflows_leaves_the_schedule_where_it_is(world: World) -> None:
    enter(world)
    config = {"stage": 2, "loss_scale": {"initial_power": 40, "hysteresis": 1}}
    folder = world.shared_folder()
    data = Sentences(40, world.seed)
    trainer = fitted(ZeroTrainer, llama(world.seed), folder, data, config, max_steps=6, fp16=True)
    assert engine_of(trainer.model).skipped_steps == 6  # of 2**40 no gradient is finite, nor of 2**35
    assert len(set(column(trainer, "learning_rate"))) == 1


@on_ranks(2)
def test_the_mixin_goes_before_any_trainer_and_train_goes_on(world: World) -> None:
    enter(world)
    seen: list[str] = []

    class Mine(ZeroTrainerMixin, Seq2SeqTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(model).__name__)
            return super().compute_loss(model, inputs, *args, **kwargs)

    data = Sentences(40, world.seed)
    folder = world.shared_folder()
    args = Seq2SeqTrainingArguments(
        str(folder), use_cpu=True, max_steps=3, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    model = llama(world.seed)
    trainer = Mine(model=model, args=args, train_dataset=data, zero_config={"stage": 3})
    trainer.train()
    assert seen == ["LlamaForCausalLM"] * 3 and trainer.model is model and engine_of(model).steps == 3
    trainer.train()
    assert engine_of(model).steps == 6
    held_out = {"eval_dataset": Sentences(16, world.seed)}  # Seq2SeqTrainer counts what fills a batch
    args = arguments(folder, max_steps=1, per_device_eval_batch_size=args.per_device_eval_batch_size)
    second = ZeroTrainer(model=model, args=args, train_dataset=data, **held_out)
    assert second.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate(**held_out)["eval_loss"])
    with pytest.raises(RuntimeError, match="by another trainer"):
        second.train()
    both = (trainer.optimizer, None)
    ZeroTrainer(model=model, args=args, train_dataset=data, optimizers=both).train()
    assert engine_of(model).steps == 7


@on_ranks(2)
def test_the_users_optimizer_and_schedule_are_used(world: World) -> None:
    enter(world)
    data = Sentences(40, world.seed)
    curves = []
    folder = world.shared_folder()
    for kind in (Trainer, ZeroTrainer):
        model = llama(world.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        args, both = arguments(folder, max_steps=5), (optimizer, schedule)
        trainer = kind(model=model, args=args, train_dataset=data, optimizers=both)
        trainer.train()
        curves.append((column(trainer, "loss"), column(trainer, "learning_rate")))
    assert largest_difference(curves[1][0], curves[0][0]) < 1e-6 and curves[1][1] == curves[0][1]
    assert curves[0][1][-1] == pytest.approx(0.05 * 0.9**4)


@on_ranks(2)
def test_adafactor_by_its_argument(world: World) -> None:
    enter(world)
    data = Sentences(40, world.seed)
    folder = world.shared_folder()
    settings = {"optim": "adafactor", "max_steps": 5, "weight_decay": 0.1}
    plain = fitted(Trainer, llama(world.seed), folder, data, **settings)
    trainer = fitted(ZeroTrainer, llama(world.seed), folder, data, {"stage": 3}, **settings)
    assert largest_difference(column(trainer, "loss"), column(plain, "loss")) < 1e-6
    assert type(trainer.optimizer.optimizer) is type(plain.optimizer.optimizer)


@on_ranks(2)
def test_a_deepspeed_json_with_auto_values_trains_like_its_arguments(world: World) -> None:
    enter(world)
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    adam = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    json = {
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            **{f"stage3_{name}": "auto" for name in ("prefetch_bucket_size", "param_persistence_threshold")},
        },
        **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
        "train_micro_batch_size_per_gpu": "auto",
    }
    data = Sentences(40, world.seed)
    settings = {"max_steps": 8, "weight_decay": 0.1, "warmup_steps": 3, "adam_beta2": 0.95}
    folder = world.shared_folder()
    plain = fitted(Trainer, llama(world.seed), folder, data, **settings)
    trainer = fitted(ZeroTrainer, llama(world.seed), folder, data, json, **settings)
    config = trainer.zero_config
    assert config.stage == 3 and config.offload.optimizer == "host" and config.precision.dtype == "keep"
    assert config.batch.train_batch_size == 4 and config.gradient_clipping == 1.0
    assert config.optimizer is not None and config.optimizer.params["betas"] == [0.9, 0.95]
    assert config.scheduler is not None and config.scheduler.params["total_num_steps"] == 8
    assert largest_difference(column(trainer, "loss")[:1], column(plain, "loss")[:1]) < 1e-6
    assert type(trainer.lr_scheduler).__name__ == "WarmupDecayLR"
