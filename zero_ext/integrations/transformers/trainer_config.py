"""The configuration of a Trainer: ``zero_config``, completed by and compared with TrainingArguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from zero_ext.config import ConfigError, Note, OptimizerConfig, ZeroConfig, load_config, load_deepspeed_config
from zero_ext.config.config_errors import Problem, show
from zero_ext.config.json_file import read_json_object
from zero_ext.integrations.transformers.config_format import AUTO, flat, is_deepspeed

ConfigSource = ZeroConfig | Mapping[str, Any] | str | Path | None

_SOURCE = "zero_config and TrainingArguments"
_ADAMS = ("adam", "adamw")


@dataclass(frozen=True)
class _Shared:
    """A setting that both sides have: its key paths, the argument's name, and what the arguments say."""

    native: str
    deepspeed: str
    argument: str
    value: Any


def resolve_settings(
    source: ConfigSource, args: TrainingArguments, steps: int | None
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    """Return the configuration in force, and notes on keys of DeepSpeed's JSON without effect.

    What ``source`` leaves out, or calls "auto", comes from ``args``; what both say must agree. ``steps`` is
    the number of optimizer steps of the run, None while it is unknown.

    Raises:
        ConfigError: lists every contradiction with both sides, and all that the readers of the two formats
            refuse.
        TypeError: a source of another type.
    """
    shared = [*_always(args), *_optimizer(args), *_scheduler(args, steps)]
    values = _read(source)
    if values is not None and is_deepspeed(values):
        config, notes = _from_deepspeed(source, values, args, shared)
    else:
        config, notes = _from_native(source, args, shared), ()
    _refuse_savers(config)
    _refuse_other_makers(config, args)
    return config, notes


def load_settings(source: ConfigSource) -> ZeroConfig:
    """Return the configuration without TrainingArguments: what DeepSpeed's JSON calls "auto" takes some
    value.

    Right for what concerns loading: stage, tiers, storage. Raises what :func:`resolve_settings` does.
    """
    values = _read(source)
    if values is None or not is_deepspeed(values):
        return load_config(source)
    unsettled = {path: 1 for path, value in flat(values) if value == AUTO}
    flags = {path: False for path in unsettled if path.endswith(".enabled")}
    betas = {path: [0.9, 0.999] for path in unsettled if path.endswith(".betas")}
    known = {path for path in unsettled if not path.startswith("zero_optimization.")}
    resolve = {path: value for path, value in {**unsettled, **flags, **betas}.items() if path in known}
    return load_deepspeed_config(values, resolve).config


def _always(args: TrainingArguments) -> list[_Shared]:
    """Return what every Trainer has: batch sizes and clipping."""
    micro, steps = args.train_batch_size, args.gradient_accumulation_steps
    total = micro * steps * args.world_size
    words = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
    return [
        _Shared(
            "batch.micro_batch_size", "train_micro_batch_size_per_gpu", "per_device_train_batch_size", micro
        ),
        _Shared(
            "batch.gradient_accumulation_steps",
            "gradient_accumulation_steps",
            "gradient_accumulation_steps",
            steps,
        ),
        _Shared("batch.train_batch_size", "train_batch_size", words, total),
        _Shared("gradient_clipping", "gradient_clipping", "max_grad_norm", float(args.max_grad_norm or 0.0)),
    ]


def _optimizer(args: TrainingArguments) -> list[_Shared]:
    found = {
        "lr": ("learning_rate", args.learning_rate),
        "betas": ("adam_beta1 and adam_beta2", [args.adam_beta1, args.adam_beta2]),
        "eps": ("adam_epsilon", args.adam_epsilon),
        "weight_decay": ("weight_decay", args.weight_decay),
    }
    return [_Shared(path := f"optimizer.params.{key}", path, *pair) for key, pair in found.items()]


def _scheduler(args: TrainingArguments, steps: int | None) -> list[_Shared]:
    warm_up = args.get_warmup_steps(steps) if steps is not None else None
    found = {
        "warmup_min_lr": ("(not an argument)", 0.0),
        "warmup_max_lr": ("learning_rate", args.learning_rate),
        "warmup_num_steps": ("warmup_steps", warm_up),
        "total_num_steps": ("the number of training steps", steps),
    }
    return [_Shared(path := f"scheduler.params.{key}", path, *pair) for key, pair in found.items()]


def _read(source: ConfigSource) -> dict[str, Any] | None:
    """Return the keys as they were written; None for a typed configuration or none."""
    if isinstance(source, str | Path):
        return read_json_object(source)
    return dict(source) if isinstance(source, Mapping) else None


def _from_native(source: ConfigSource, args: TrainingArguments, shared: list[_Shared]) -> ZeroConfig:
    config = load_config(source)
    problems = [_contradiction(each, each.native, _said(config, each.native)) for each in shared]
    wanted = _wanted_dtype(args)
    seen = _said(config, "precision.dtype")
    if wanted is not None and seen is not None and seen != wanted:
        problems.append(_disagree("precision.dtype", seen, wanted, True))
    _refuse([problem for problem in problems if problem is not None])
    *batch, clipping = _always(args)
    changes: dict[str, Any] = {
        "batch": config.batch.replace(**{each.native.rpartition(".")[2]: each.value for each in batch}),
        "gradient_clipping": clipping.value,
    }
    if wanted is not None:
        changes["precision"] = config.precision.replace(dtype=wanted)
    if config.optimizer is not None:
        changes["optimizer"] = _completed(config.optimizer, args)
    return config.replace(**changes)


def _said(config: ZeroConfig, path: str) -> Any:
    """Return the value at a key path if whoever wrote the configuration gave one, else None."""
    found: Any = config
    for name in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(name)
        elif found is None or name not in found.model_fields_set:
            return None
        else:
            found = getattr(found, name)
    return found


def _completed(policy: OptimizerConfig, args: TrainingArguments) -> OptimizerConfig:
    params = dict(policy.params)
    names = ["lr"]
    if policy.type.lower() in _ADAMS:
        names += ["betas", "eps", "weight_decay"]
    for each in _optimizer(args):
        name = each.native.rpartition(".")[2]
        if name in names:
            params.setdefault(name, each.value)
    return policy.replace(params=params)


def _from_deepspeed(
    source: ConfigSource, values: dict[str, Any], args: TrainingArguments, shared: list[_Shared]
) -> tuple[ZeroConfig, tuple[Note, ...]]:
    values = copy.deepcopy(values)
    written = {path.replace("bfloat16.", "bf16."): value for path, value in flat(values)}
    problems = [_contradiction(each, each.deepspeed, written.get(each.deepspeed)) for each in shared]
    wanted = _wanted_dtype(args)
    for dtype, other in (("fp16", "bf16"), ("bf16", "fp16")):
        said = written.get(f"{dtype}.enabled")
        if (said is False and wanted == dtype) or (said is True and wanted == other):
            problems.append(_disagree(f"{dtype}.enabled", said, wanted, True))
    _refuse([problem for problem in problems if problem is not None])
    for each in _always(args):
        values.setdefault(each.deepspeed, AUTO)
    if wanted is not None and f"{wanted}.enabled" not in written:
        values[wanted] = {**values.get(wanted, {}), "enabled": True}
    optimizer = values.get("optimizer")
    if isinstance(optimizer, Mapping) and str(optimizer.get("type", "")).lower() in _ADAMS:
        params = {each.deepspeed.rpartition(".")[2]: AUTO for each in _optimizer(args)}
        values["optimizer"] = {**optimizer, "params": {**params, **optimizer.get("params", {})}}
    resolve = {each.deepspeed: each.value for each in shared if each.value is not None}
    # The number of steps may be unknown as yet: any will do to check the rest.
    resolve.setdefault("scheduler.params.total_num_steps", 1)
    warm_up = resolve.get("scheduler.params.warmup_num_steps", 1)
    resolve["scheduler.params.warmup_num_steps"] = max(1, warm_up)
    resolve |= {"fp16.enabled": bool(args.fp16), "bf16.enabled": bool(args.bf16)}
    try:
        translation = load_deepspeed_config(values, resolve)
    except ConfigError as error:
        raise (error.within(str(source)) if isinstance(source, str | Path) else error) from None
    return translation.config, translation.notes


def _wanted_dtype(args: TrainingArguments) -> str | None:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else None


def _contradiction(each: _Shared, path: str, seen: Any) -> Problem | None:
    if seen is None or each.value is None or seen == AUTO or _same(seen, each.value):
        return None
    # An argument at its default of none, or no argument at all: only one side speaks.
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
        "or "
        "leave the key out of zero_config to take the argument's value.",
    )


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems, _SOURCE)


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
    optim, schedule = str(getattr(args.optim, "value", args.optim)), args.lr_scheduler_type
    schedule = str(getattr(schedule, "value", schedule))
    if config.optimizer is not None:
        adam = optim.startswith("adamw") and config.optimizer.type.lower() in _ADAMS
        if optim != _default_of(args, "optim") and not adam:
            problems.append(_disagree("optimizer.type", config.optimizer.type, "optim", optim))
    if config.scheduler is not None and schedule != _default_of(args, "lr_scheduler_type"):
        problems.append(_disagree("scheduler.type", config.scheduler.type, "lr_scheduler_type", schedule))
    _refuse(problems)


def refuse_duplicates(config: ZeroConfig, optimizer: Any, scheduler: Any) -> None:
    """Raise ``ConfigError`` for an optimizer or a scheduler that was passed in addition to one of
    ``config``.
    """
    problems = []
    for section, policy, value in (
        ("optimizer", config.optimizer, optimizer),
        ("scheduler", config.scheduler, scheduler),
    ):
        if policy is not None and value is not None:
            kind = value[0] if isinstance(value, tuple) else type(value)  # optimizer_cls_and_kwargs
            why = f"the trainer was given {kind.__name__}. Leave the section or the argument out."
            problems.append(Problem(f"{section}.type", f"zero_config has {show(policy.type)}, {why}"))
    if problems:
        raise ConfigError(problems, "zero_config and the trainer's arguments")


def _default_of(args: TrainingArguments, name: str) -> str:
    default = type(args).__dataclass_fields__[name].default
    return str(getattr(default, "value", default))
