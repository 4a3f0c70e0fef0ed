"""What configuration a Trainer has: filled in from its arguments, contradictions shown with both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer
from transformers.optimization import Adafactor, AdafactorSchedule
from transformers.training_args import OptimizerNames

from tests.config.written import FORMS, check
from tests.integrations.transformers.models import Sentences, arguments, llama
from zero_ext.config import ConfigError, ZeroConfig
from zero_ext.config.sources.config_source import read_config
from zero_ext.integrations.transformers import ZeroTrainer
from zero_ext.integrations.transformers.trainer_config import load_settings, resolve_settings
from zero_ext.optim.fused_optimizers import Lion
from zero_ext.zero.api.engine_lookup import engine_of

DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}


def test_what_is_left_out_comes_from_the_arguments(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3, "bf16": True, "learning_rate": 0.02}
    args = arguments(tmp_path, **settings, weight_decay=0.3, adam_epsilon=1e-7)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stage": 1, "optimizer": {"type": "AdamW"}}))
    deepspeed = tmp_path / "deepspeed.json"
    deepspeed.write_text(json.dumps({**DEEPSPEED, "bf16": {"enabled": "auto"}}))
    typed = ZeroConfig.from_mapping({"stage": 1, "optimizer": {"type": "AdamW"}})
    sources = {3: (None,), 0: ({"stage": 0},), 1: (typed, path), 2: (str(deepspeed), DEEPSPEED)}
    for stage, source in ((stage, each) for stage, several in sources.items() for each in several):
        config, _ = resolve_settings(read_config(source), args, None)
        assert config.stage == stage and config.gradient_clipping == 0.3
        assert config.precision.dtype == "bf16"
        batch = config.batch
        assert (batch.micro_batch_size, batch.gradient_accumulation_steps, batch.train_batch_size) == (
            2,
            4,
            8,
        )
        if config.optimizer is not None:
            params = config.optimizer.params
            assert (params["lr"], params["weight_decay"], params["eps"]) == (0.02, 0.3, 1e-7)
            assert list(params["betas"]) == [0.9, 0.999]
    assert load_settings(DEEPSPEED).offload.optimizer == "host"
    assert load_settings(str(path)).stage == 1


@pytest.mark.parametrize("form", FORMS)
def test_forms(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, args = FORMS[form](tmp_path), arguments(tmp_path, max_grad_norm=0.25)
    check(resolve_settings(read_config(source), args, None)[0])
    check(load_settings(source))
    monkeypatch.setenv("ZERO_EXT_CONFIG", "stage=1")
    assert resolve_settings(read_config(source), args, None)[0].stage == load_settings(source).stage == 1
    # Held against the arguments like all else.
    monkeypatch.setenv("ZERO_EXT_CONFIG", "batch.train_batch_size=6")
    with pytest.raises(ConfigError, match=r"train_batch_size.*6.*ranks = 2"):
        resolve_settings(read_config(source), args, None)


SCALE = {"loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 500, "hysteresis": 3}


@pytest.mark.parametrize("enabled", [{}, {"enabled": "auto"}, {"enabled": True}], ids=str)
def test_a_dtype_of_the_arguments_enables_the_rest_of_its_section(
    tmp_path: Path, enabled: dict[str, Any]
) -> None:
    def resolved(name: str, keys: dict[str, Any], **more: Any) -> ZeroConfig:
        values = {**STAGE_1, name: {**enabled, **keys}, **more}
        return resolve_settings(read_config(values), arguments(tmp_path, **{name: True}), None)[0]

    scale = resolved("fp16", SCALE).loss_scale
    assert (scale.initial_power, scale.window, scale.hysteresis) == (20, 500, 3)
    assert resolved("bf16", {"bf16_optimizer_states": True}).precision.moments_dtype == "bf16"
    assert resolved("bf16", {}, data_types={"grad_accum_dtype": "fp32"}).precision.dtype == "bf16"
    with pytest.raises(ConfigError, match="bf16_master_weights_and_grads"):
        resolved("bf16", {"bf16_master_weights_and_grads": True})


CHANGES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("gradient_clipping=0", ZeroConfig(stage=2), {}, "gradient_clipping: .*0"),
    ("gradient_clipping=0", {"stage": 2}, {}, "gradient_clipping: .*0"),
    ('batch={"micro_batch_size":3}', {"zero_optimization": {"stage": 2}}, {}, "micro_batch_size: .*3"),
    ("precision.dtype=fp32", {"zero_optimization": {"stage": 2}}, {"bf16": True}, "precision.dtype: .*fp32"),
    ("precision.dtype=keep", ZeroConfig(stage=2), {"bf16": True}, "precision.dtype: .*keep"),
]


@pytest.mark.parametrize(("text", "source", "settings", "words"), CHANGES)
def test_the_environment_is_held_against_the_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    source: Any,
    settings: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setenv("ZERO_EXT_CONFIG", text)
    with pytest.raises(ConfigError, match=words):
        resolve_settings(read_config(source), arguments(tmp_path, **settings), None)


@pytest.mark.parametrize("source", [{"stage": 2}, {"zero_optimization": {"stage": 2}}, ZeroConfig(stage=2)])
def test_the_engine_has_the_trainers_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    monkeypatch.setenv(
        "ZERO_EXT_CONFIG",
        'precision={"reduction":"rank_order"} batch={"drop_last":true} check_finite=false',
    )
    args = arguments(tmp_path, max_steps=1, bf16=True, gradient_accumulation_steps=2)
    trainer = ZeroTrainer(model=llama(0), args=args, train_dataset=Sentences(8, 0), zero_config=source)
    trainer.train()
    config = engine_of(trainer.model).config
    assert config.precision == trainer.zero_config.precision and config.precision.dtype == "bf16"
    assert config.batch.gradient_accumulation_steps == 2 and config.batch.drop_last
    assert (config.stage, config.check_finite) == (2, False)


def section(name: str, kind: str, **params: Any) -> dict[str, Any]:
    return {name: {"type": kind, "params": params}}


BF16, STAGE_1, STEPS = {"bf16": True}, {"zero_optimization": {"stage": 1}}, "gradient_accumulation_steps"
WARM = section("scheduler", "WarmupLR", warmup_num_steps=7)
CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"gradient_clipping": 0.5}, {}, ("gradient_clipping", "0.5", "max_grad_norm = 1.0")),
    ({"batch": {"micro_batch_size": 3}}, {}, ("micro_batch_size", "3", "per_device_train_batch_size = 2")),
    ({"batch": {"train_batch_size": 16}}, {}, ("train_batch_size", "16", "ranks = 2")),
    ({"batch": {STEPS: 4}}, {STEPS: 2}, (STEPS, "4", "= 2")),
    ({"precision": {"dtype": "fp16"}}, BF16, ("precision.dtype", "'fp16'", "bf16 = True")),
    (section("optimizer", "AdamW", lr=1.0), {}, ("optimizer.params.lr", "1.0", "learning_rate = 0.005")),
    (WARM, {"warmup_steps": 3}, ("warmup_num_steps", "7", "warmup_steps = 3")),
    ({"checkpoint": {"async_save": True}}, {}, ("checkpoint.async_save", "older checkpoints")),
    ({"checkpoint": {"keep_last": 2}}, {}, ("checkpoint.keep_last", "save_total_limit")),
    ({"stage": 4}, {}, ("stage", "4")),
    ({"stages": 3}, {}, ("stages", "stage")),
    ({**DEEPSPEED, "gradient_clipping": 0.5}, {}, ("gradient_clipping", "0.5", "max_grad_norm = 1.0")),
    ({**DEEPSPEED, "train_batch_size": 4}, {}, ("train_batch_size", "4", "= 2")),
    ({**DEEPSPEED, "bf16": {"enabled": False}}, BF16, ("bf16.enabled", "False", "bf16 = True")),
    ({**DEEPSPEED, "fp16": {"enabled": True}}, BF16, ("fp16.enabled", "True", "bf16 = True")),
    (STAGE_1 | section("optimizer", "Adam", betas=[0.8, 0.9]), {}, ("betas", "[0.8, 0.9]", "[0.9, 0.999]")),
    (
        DEEPSPEED | section("scheduler", "WarmupDecayLR", total_num_steps=50),
        {},
        ("total_num_steps", "50", "training steps = 10"),
    ),
    ({**DEEPSPEED, "zero_optimization": {"stage": 2, "stag": 3}}, {}, ("zero_optimization.stag",)),
    ({**DEEPSPEED, "sparse_gradients": True}, {}, ("sparse_gradients", "unsupported")),
    ({"optimizer": {"type": "AdamW"}}, {"optim": "sgd"}, ("optimizer.type", "'AdamW'", "optim = 'sgd'")),
    (
        DEEPSPEED | section("scheduler", "WarmupLR"),
        {"lr_scheduler_type": "cosine"},
        ("scheduler.type", "'WarmupLR'", "lr_scheduler_type = 'cosine'"),
    ),
    # Two formats in one configuration, and "auto" where nothing can say what it is.
    ({**DEEPSPEED, "stage": 3}, {}, ("configuration: ", "zero_optimization: is DeepSpeed's", "'stage'")),
    (
        {"stage": 3, "units": {"bucket_elements": "auto"}},
        {},
        ("units.bucket_elements: expected a value", "leave the key out"),
    ),
    (
        {"zero_optimization": {"stage": "auto"}},
        {},
        ("zero_optimization.stage: expected a value", "Write a value"),
    ),
    (
        DEEPSPEED | section("optimizer", "SGD", momentum="auto"),
        {},
        ("momentum: expected a value", "Write a value"),
    ),
    ({"stag": 3}, {}, ("stag: unknown key. Did you mean stage?",)),
    # What only the optimizer's class can refuse is refused as early.
    (section("optimizer", "AdamW", lrr=1), {}, ("optimizer.params.lrr", "AdamW has no")),
]


@pytest.mark.parametrize(("config", "changes", "words"), CONTRADICTIONS)
def test_contradictions_are_refused_with_both_sides(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    args = arguments(tmp_path, max_steps=10, **changes)
    model = llama(0)
    with pytest.raises(ConfigError) as caught:
        ZeroTrainer(model=model, args=args, train_dataset=Sentences(8, 0), zero_config=config)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    # It is an ordinary model still. Fresh arguments: accelerate keeps the precision that came first.
    Trainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=Sentences(8, 0)).train()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "expected JSON, got .* at line 1, column 1"),
        ('{"stage": 3,\n "seed": }', "expected JSON, got .* at line 2, column 10.*seed"),
        ("[3]", "expected an object at the top level, got a list"),
        ('{"stage": 3, "stage": 2}', "'stage': it occurs twice"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text)
    for read in (
        lambda: resolve_settings(read_config(path), arguments(tmp_path), None),
        lambda: load_settings(path),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)own\.json.*{words}"):
            read()


def test_a_configuration_of_another_type_is_refused(tmp_path: Path) -> None:
    for wrong in (3, [("stage", 3)], b"own.json"):
        with pytest.raises(TypeError, match="expected a ZeroConfig, a mapping, a path"):
            ZeroTrainer(model=llama(0), args=arguments(tmp_path), zero_config=wrong)


def test_a_second_optimizer_besides_the_configured_one_is_refused(tmp_path: Path) -> None:
    model = llama(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {}}}
    settings: dict[str, Any] = {"model": model, "args": arguments(tmp_path), "zero_config": config}
    with pytest.raises(ConfigError, match=r"(?s)optimizer.type.*'AdamW'.*SGD.*scheduler.type.*StepLR"):
        ZeroTrainer(**settings, optimizers=(optimizer, schedule))
    with pytest.raises(ConfigError, match=r"optimizer.type.*'AdamW'.*Lion"):
        ZeroTrainer(**settings, optimizer_cls_and_kwargs=(Lion, {}))


def test_every_contradiction_is_listed_at_once(tmp_path: Path) -> None:
    config = {"gradient_clipping": 0.5, "batch": {"micro_batch_size": 3}}
    with pytest.raises(ConfigError) as caught:
        resolve_settings(read_config(config), arguments(tmp_path), None)
    assert set(caught.value.paths) == {"gradient_clipping", "batch.micro_batch_size"}


def test_arguments_that_cannot_be_served_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bf16=True"):
        ZeroTrainer(
            model=llama(0), args=arguments(tmp_path, bf16_full_eval=True), train_dataset=Sentences(8, 0)
        )


def test_a_schedule_that_reads_unsharded_state_is_refused(tmp_path: Path) -> None:
    model = llama(0)
    optimizer = Adafactor(model.parameters())
    with pytest.raises(ValueError, match=r"AdafactorSchedule reads state(?s:.*)Pass a schedule of torch"):
        ZeroTrainer(
            model=model, args=arguments(tmp_path), optimizers=(optimizer, AdafactorSchedule(optimizer))
        )


def test_ranks_that_the_arguments_do_not_see_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, use_cpu=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 ranks were started.*has 1.*use_cpu=True"):
        ZeroTrainer(model=llama(0), args=args, train_dataset=Sentences(8, 0))


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path: Path) -> None:
    words = {f"<{number}>": number for number in range(70)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")))
    model = llama(0)
    settings: dict[str, Any] = {"args": arguments(tmp_path), "processing_class": tokenizer}
    with pytest.raises(ValueError, match=r"70 tokens, the model embeds 64.*resize_token_embeddings\(70\)"):
        ZeroTrainer(model=model, **settings)
    model.resize_token_embeddings(72)
    ZeroTrainer(model=model, **settings)


def test_a_refused_optimizer_names_what_works_instead(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"AdamW8bit: it is not known") as refusal:
        trained(tmp_path, optim="adamw_torch_8bit")
    text = str(refusal.value)
    options: list[dict[str, Any]] = [{"optim": name} for name in OptimizerNames if f"'{name.value}'" in text]
    assert len(options) == 4
    options += [{"precision": {"moments_dtype": dtype}} for dtype in ("8bit", "bf16") if f"'{dtype}'" in text]
    assert len(options) == 6
    for changes in options:
        assert trained(tmp_path, **changes).state.global_step == 1


def trained(folder: Path, **changes: Any) -> ZeroTrainer:
    config = {"stage": 1, "precision": changes.pop("precision", {})}
    args = arguments(folder, max_steps=1, **changes)
    trainer = ZeroTrainer(model=llama(1), args=args, train_dataset=Sentences(4, 1), zero_config=config)
    trainer.train()
    return trainer
