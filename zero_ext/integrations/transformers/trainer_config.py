"""The arguments of a Trainer: ``zero_config``, completed by and compared with TrainingArguments, and what a
sharded Trainer cannot serve."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from zero_ext.config import ConfigError, Note, ZeroConfig
from zero_ext.config.config_errors import Problem, show
from zero_ext.config.deepspeed.deepspeed_keys import AUTO, LEFT_OUT
from zero_ext.config.sources.config_source import ConfigSource, WrittenConfig, read_config
from zero_ext.integrations.prepare_with_features import written_value
from zero_ext.integrations.requested_layout import parallelism_problems, with_parallelism

_SOURCE = "zero_config and TrainingArguments"
_ADAMS = ("adam", "adamw")


class _Shared(NamedTuple):
    """A setting that both sides have: its key paths, the argument's name, and what the arguments say."""

    native: str
    deepspeed: str
    argument: str
    value: Any

    @property
    def key(self) -> str:
        """The last key of its path."""
        return self.native.rpartition(".")[2]


def resolve_settings(
    written: WrittenConfig, args: TrainingArguments, steps: int | None
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    """Return the configuration in force, and notes on keys of DeepSpeed's JSON without effect.

    What ``written`` leaves out, or calls "auto", comes from ``args``; what both say must agree. ``steps`` is
    the number of optimizer steps of the run, None while it is unknown.

    Raises:
        ConfigError: lists every contradiction with both sides, and all that the readers of the two formats
            refuse.
    """
    shared = [*_always(args), *_optimizer(args), *_scheduler(args, steps)]
    values: dict[str, Any] = {each.native: each.value for each in shared if each.value is not None}
    # The number of steps may be unknown as yet: any will do to check the rest.
    values.setdefault("scheduler.params.total_num_steps", 1)
    values["scheduler.params.warmup_num_steps"] = max(1, values.get("scheduler.params.warmup_num_steps", 1))
    values["precision.dtype"] = _wanted_dtype(args) or "keep"
    if written.deepspeed:
        config, notes = _from_deepspeed(written, args, shared, values)
    else:
        config, notes = _from_native(written, args, shared, values), ()
    _refuse_savers(config)
    _refuse_other_makers(config, args)
    return with_parallelism(config, getattr(args, "parallelism_config", None)), notes


def load_settings(source: ConfigSource) -> ZeroConfig:
    """Return the configuration without TrainingArguments: what is "auto" has its default, or some value.

    Right for what concerns loading: stage, tiers, storage. Raises what `load_config` does.
    """
    written = read_config(source)
    resolve: dict[str, object] = {}
    for path, value in written.flat().items():
        if value == AUTO and path.endswith(".betas"):
            resolve[path] = [0.9, 0.999]
        elif value == AUTO and not path.startswith(("zero_optimization.", "stage", "offload.")):
            resolve[path] = False if path.endswith(".enabled") else LEFT_OUT
    return written.resolved(resolve)[0]


def _always(args: TrainingArguments) -> list[_Shared]:
    """Return what every Trainer has: batch sizes and clipping."""
    micro, steps = args.train_batch_size, args.gradient_accumulation_steps
    accumulation = "gradient_accumulation_steps"
    total = f"per_device_train_batch_size x {accumulation} x ranks"
    rows = (
        ("batch.micro_batch_size", "train_micro_batch_size_per_gpu", "per_device_train_batch_size", micro),
        (f"batch.{accumulation}", accumulation, accumulation, steps),
        ("batch.train_batch_size", "train_batch_size", total, micro * steps * args.world_size),
        ("gradient_clipping", "gradient_clipping", "max_grad_norm", float(args.max_grad_norm or 0.0)),
    )
    return [_Shared(*row) for row in rows]


def _optimizer(args: TrainingArguments) -> list[_Shared]:
    return _params_of(
        "optimizer",
        lr=("learning_rate", args.learning_rate),
        betas=("adam_beta1 and adam_beta2", [args.adam_beta1, args.adam_beta2]),
        eps=("adam_epsilon", args.adam_epsilon),
        weight_decay=("weight_decay", args.weight_decay),
    )


def _scheduler(args: TrainingArguments, steps: int | None) -> list[_Shared]:
    return _params_of(
        "scheduler",
        warmup_min_lr=("(not an argument)", 0.0),
        warmup_max_lr=("learning_rate", args.learning_rate),
        warmup_num_steps=("warmup_steps", None if steps is None else args.get_warmup_steps(steps)),
        total_num_steps=("the number of training steps", steps),
    )


def _params_of(section: str, **params: tuple[str, Any]) -> list[_Shared]:
    return [_Shared(path := f"{section}.params.{key}", path, *pair) for key, pair in params.items()]


def _from_native(
    written: WrittenConfig, args: TrainingArguments, shared: list[_Shared], values: dict[str, Any]
) -> ZeroConfig:
    config, _ = written.resolved(values)
    if config.optimizer is not None and config.optimizer.type == "Muon":
        # Its eps is not Adam's, which is adamw.eps there.
        shared = [each for each in shared if each.native != "optimizer.params.eps"]
    problems = [_contradiction(each, each.native, written_value(config, each.native)) for each in shared]
    wanted, seen = _wanted_dtype(args), written_value(config, "precision.dtype")
    if wanted is not None and seen is not None and seen != wanted:
        problems.append(_disagree("precision.dtype", seen, wanted, True))
    _refuse(problems)
    *batch, clipping = _always(args)
    changes: dict[str, Any] = {
        "batch": config.batch.replace(**{each.key: each.value for each in batch}),
        "gradient_clipping": clipping.value,
    }
    if wanted is not None:
        changes["precision"] = config.precision.replace(dtype=wanted)
    if config.optimizer is not None:
        policy, adam = config.optimizer, config.optimizer.type.lower() in _ADAMS
        params = {each.key: each.value for each in _optimizer(args) if adam or each.key == "lr"}
        changes["optimizer"] = policy.replace(params={**params, **policy.params})
    return config.replace(**changes)


def _from_deepspeed(
    written: WrittenConfig, args: TrainingArguments, shared: list[_Shared], values: dict[str, Any]
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    said = {path.replace("bfloat16.", "bf16."): value for path, value in written.flat().items()}
    problems = [_contradiction(each, each.deepspeed, said.get(each.deepspeed)) for each in shared]
    problems += [_contradiction(each, each.native, written.overrides.get(each.native)) for each in shared]
    wanted, changed = _wanted_dtype(args), written.overrides.get("precision.dtype")
    if wanted is not None and changed not in (None, wanted):
        problems.append(_disagree("precision.dtype", changed, wanted, True))
    for dtype, other in (("fp16", "bf16"), ("bf16", "fp16")):
        enabled = said.get(f"{dtype}.enabled")
        if (enabled is False and wanted == dtype) or (enabled is True and wanted == other):
            problems.append(_disagree(f"{dtype}.enabled", enabled, wanted, True))
    _refuse(problems)
    left_out = {each.deepspeed: AUTO for each in _always(args)}
    keys: dict[str, Any] = {**left_out, **written.values}
    optimizer = keys.get("optimizer")
    if isinstance(optimizer, Mapping) and str(optimizer.get("type", "")).lower() in _ADAMS:
        params = {each.key: AUTO for each in _optimizer(args)}
        keys["optimizer"] = {**optimizer, "params": {**params, **(optimizer.get("params") or {})}}
    return dataclasses.replace(written, values=keys).with_dtype(wanted).resolved(values)


def _wanted_dtype(args: TrainingArguments) -> str | None:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else None


def _contradiction(each: _Shared, path: str, seen: Any) -> Problem | None:
    if seen is None or each.value is None or seen == AUTO or _same(seen, each.value):
        return None
    # An argument at its default of none, or no argument at all: there is nothing to contradict.
    silent = (each.argument == "warmup_steps" and each.value == 0) or each.argument.startswith("(")
    return None if silent else _disagree(path, seen, each.argument, each.value)


def _same(seen: Any, value: Any) -> bool:
    if isinstance(value, list | tuple):
        return isinstance(seen, list | tuple) and list(seen) == list(value)
    return bool(seen == value)


def _disagree(path: str, seen: Any, argument: str, value: Any) -> Problem:
    return Problem(
        path,
        f"zero_config has {show(seen)}, TrainingArguments has {argument} = {show(value)}. Make them agree, "
        "or leave the key out of zero_config to take the argument's value.",
    )


def _refuse(problems: Iterable[Problem | None], source: str = _SOURCE) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError(found, source)


def _refuse_savers(config: ZeroConfig) -> None:
    problems = []
    if config.checkpoint.async_save:
        why = "the Trainer deletes older checkpoints as soon as a save returns. Leave it false."
        problems.append(Problem("checkpoint.async_save", f"got True: {why}"))
    if config.checkpoint.keep_last is not None:
        why = "the Trainer counts its own folders. Use TrainingArguments(save_total_limit=...)."
        problems.append(Problem("checkpoint.keep_last", f"got {config.checkpoint.keep_last}: {why}"))
    _refuse(problems)


def _refuse_other_makers(config: ZeroConfig, args: TrainingArguments) -> None:
    """Refuse an optimizer or a schedule that both sides name. Defaults of the arguments name none."""
    problems = []
    for section, policy, name in (
        ("optimizer", config.optimizer, "optim"),
        ("scheduler", config.scheduler, "lr_scheduler_type"),
    ):
        default = type(args).__dataclass_fields__[name].default
        chosen, default = (str(getattr(each, "value", each)) for each in (getattr(args, name), default))
        if policy is None or chosen == default:
            continue
        if name != "optim" or not (chosen.startswith("adamw") and policy.type.lower() in _ADAMS):
            problems.append(_disagree(f"{section}.type", policy.type, name, chosen))
    _refuse(problems)


def refuse_duplicates(config: ZeroConfig, optimizer: Any, scheduler: Any) -> None:
    """Raise ``ConfigError`` for an optimizer or a scheduler that was passed besides one of ``config``."""
    problems = []
    for section, value in (("optimizer", optimizer), ("scheduler", scheduler)):
        policy = getattr(config, section)
        if policy is not None and value is not None:
            kind = value[0] if isinstance(value, tuple) else type(value)  # optimizer_cls_and_kwargs
            why = f"the trainer was given {kind.__name__}. Leave the section or the argument out."
            problems.append(Problem(f"{section}.type", f"zero_config has {show(policy.type)}, {why}"))
    _refuse(problems, "zero_config and the trainer's arguments")


def refuse_arguments(trainer: Any) -> None:
    """Raise ``ValueError`` that lists all arguments of ``trainer`` that contradict a sharded model."""
    args = trainer.args
    full_eval = "fp16_full_eval" if args.fp16_full_eval else "bf16_full_eval"
    cases = (
        (
            trainer.is_deepspeed_enabled,
            "TrainingArguments(deepspeed=...) starts DeepSpeed itself. Pass its JSON as zero_config=.",
        ),
        (
            trainer.is_fsdp_enabled or bool(args.fsdp),
            "TrainingArguments(fsdp=...) shards with FSDP. Remove it: zero_config shards the model.",
        ),
        (
            args.fp16_full_eval or args.bf16_full_eval,
            f"{full_eval} would convert sharded parameters, which are evaluated in the precision they train "
            f"in. Set {full_eval[:4]}=True, or precision.dtype in zero_config.",
        ),
        (
            type(trainer.lr_scheduler).__name__ == "AdafactorSchedule",
            "AdafactorSchedule reads state of the unsharded optimizer. Pass a schedule of torch, or a "
            "'scheduler' section in zero_config.",
        ),
        (
            args.n_gpu > 1,
            f"one process drives {args.n_gpu} GPUs with DataParallel. Start one process per GPU: torchrun "
            "--nproc-per-node gpu.",
        ),
        (getattr(trainer, "is_model_parallel", False), "the model is spread by device_map. Load it without."),
    )
    found = [why for refused, why in cases if refused]
    found += parallelism_problems(getattr(args, "parallelism_config", None), args.world_size)
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != args.world_size:
        found.append(
            f"{ranks} ranks were started, and TrainingArguments has {args.world_size}. On a machine without "
            "accelerator pass use_cpu=True, and let torchrun (RANK, WORLD_SIZE, LOCAL_RANK) start the ranks "
            f"(accelerator here: {torch.cuda.is_available()})."
        )
    if found:
        raise ValueError(f"ZeroTrainer: unsupported arguments: {' '.join(found)} Change them.")


def refuse_with_layout(trainer: Any, config: ZeroConfig) -> None:
    """Raise ``ValueError`` that lists what of ``trainer`` is not exact with the section `parallel`."""
    args, section = trainer.args, config.parallel
    sequences = section.cp > 1
    cases = (
        (
            max(section.cp, section.ep) > 1 and isinstance(getattr(trainer, "ref_model", None), nn.Module),
            "the reference model would see other sequences or have all experts. Train without it, or remove "
            "the section.",
        ),
        (
            sequences and args.label_smoothing_factor,
            "label_smoothing_factor needs the logits of all tokens. Set it to 0.",
        ),
        (
            sequences and trainer.compute_loss_func is not None,
            "compute_loss_func would get labels of all tokens and logits of some. Leave it out.",
        ),
        (
            sequences and args.neftune_noise_alpha is not None,
            "neftune_noise_alpha scales noise by the length of a shard. Leave it out.",
        ),
        (
            sequences and getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
            "train_sampling_strategy 'batch_rebalance' gives every rank other samples. Choose another.",
        ),
        (
            sequences and trainer.accelerator.dispatch_batches,
            "dispatch_batches gives every rank other samples. Leave it out of accelerator_config.",
        ),
        (
            getattr(trainer.accelerator, "parallelism_config", None) is not None,
            "parallelism_config has reached Accelerate, as this Trainer was built without zero_ext. Use "
            "ZeroTrainer, or put ZeroTrainerMixin before its class.",
        ),
    )
    found = [why for refused, why in cases if refused]
    if found:
        lengths = f"cp={section.cp} and ep={section.ep}"
        raise ValueError(
            f"{type(trainer).__name__} with {lengths}: unsupported arguments: {' '.join(found)} Change them."
        )


def refuse_adapters(trainer: Any) -> None:
    """Raise ``ValueError`` for a model with PEFT's adapters: checkpoints of a trainer without support for
    them would hold the whole base model and miss ``modules_to_save``.
    """
    from_peft = getattr(sys.modules.get("peft"), "PeftModel", None)
    if from_peft is not None and isinstance(trainer.model, from_peft):
        raise ValueError(
            f"{type(trainer).__name__}: expected a model without adapters, got "
            f"{type(trainer.model).__name__}. Use ZeroPeftTrainer, or put ZeroPeftTrainerMixin before your "
            "trainer's class, both from zero_ext.integrations.peft."
        )
    if getattr(trainer.model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{type(trainer.model).__name__}: its adapters come from add_adapter or load_adapter. Make "
            "them with "
            "peft.get_peft_model(model, config), and use ZeroPeftTrainer from zero_ext.integrations.peft."
        )


def refuse_tokenizer(model: Any, processing_class: Any) -> None:
    """Raise ``ValueError`` if the tokenizer has tokens without an embedding in ``model``."""
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings is None or not isinstance(processing_class, PreTrainedTokenizerBase):
        return
    try:
        weight = getattr(embeddings(), "weight", None)
    except NotImplementedError:
        return
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return
    tokens, rows = len(processing_class), weight.shape[0]
    if tokens > rows:
        raise ValueError(
            f"the tokenizer has {tokens} tokens, the model embeds {rows}: token numbers from {rows} on would "
            f"be out of range. Call model.resize_token_embeddings({tokens}) before making the trainer, or "
            "give the tokenizer that belongs to the model."
        )
