"""Arguments that a sharded Trainer cannot serve, each with what to do instead."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase, Trainer


def refuse_arguments(trainer: Trainer) -> None:
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
            args.torch_compile,
            "torch_compile compiles the whole model around its hooks. Compile the blocks before making the "
            "trainer: for block in model.model.layers: block.compile().",
        ),
        (
            args.fp16_full_eval or args.bf16_full_eval,
            f"{full_eval} would convert sharded parameters, which are evaluated in the precision they "
            "train in. "
            f"Set {full_eval[:4]}=True, or precision.dtype in zero_config.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size tries again after the model was sharded. Set per_device_train_batch_size.",
        ),
        (
            args.n_gpu > 1,
            f"one process drives {args.n_gpu} GPUs with DataParallel. Start one process per GPU: torchrun "
            "--nproc-per-node gpu.",
        ),
        (getattr(trainer, "is_model_parallel", False), "the model is spread by device_map. Load it without."),
    )
    found = [why for refused, why in cases if refused]
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != args.world_size:
        found.append(
            f"{ranks} ranks were started, and TrainingArguments has {args.world_size}. On a machine without "
            "accelerator pass use_cpu=True, and let torchrun (RANK, WORLD_SIZE, LOCAL_RANK) start the ranks "
            f"(accelerator here: {torch.cuda.is_available()})."
        )
    if found:
        raise ValueError(f"ZeroTrainer: unsupported arguments: {' '.join(found)} Change them.")


def refuse_adapters(trainer: Trainer) -> None:
    """Raise ``ValueError`` for a model with PEFT's adapters: checkpoints of a trainer without support for
    them would hold the whole base model and miss ``modules_to_save``.
    """
    from_peft = getattr(sys.modules.get("peft"), "PeftModel", None)
    if from_peft is not None and isinstance(trainer.model, from_peft):
        raise ValueError(
            f"{type(trainer).__name__}: expected a model without adapters, got "
            f"{type(trainer.model).__name__}. "
            "Use ZeroPeftTrainer, or put ZeroPeftTrainerMixin before your trainer's class, both from "
            "zero_ext.integrations.peft."
        )
    if getattr(trainer.model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{type(trainer.model).__name__}: its adapters come from add_adapter or load_adapter. Make "
            "them with "
            "peft.get_peft_model(model, config), and use ZeroPeftTrainer from zero_ext.integrations.peft."
        )


def refuse_tokenizer(model: Any, processing_class: Any) -> None:
    """Raise ``ValueError`` if the tokenizer has tokens without an embedding in ``model``."""
    if not isinstance(processing_class, PreTrainedTokenizerBase) or not hasattr(
        model, "get_input_embeddings"
    ):
        return
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
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
