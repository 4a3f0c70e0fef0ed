"""TRL's trainers as its users run them, one after the other: ``trainers.py INPUT_FOLDER OUT_FOLDER CASE...``.

The engine and its JSON come from the environment, as 'accelerate launch' sets it.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import trl
from accelerate.state import AcceleratorState, GradientState
from datasets import load_from_disk
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
    set_seed,
)
from trl.models import unwrap_model_for_generation

START, OUT = Path(sys.argv[1]), Path(sys.argv[2])


class SeedsEveryStep(TrainerCallback):
    """Sampled completions are those of the seed, whatever drew random numbers before."""

    def on_step_begin(self, args, state, control, **_):
        set_seed(1000 * state.global_step + args.process_index)


def lengths(completions, **_):
    return [len(each) / 7 for each in completions]


def arguments(kind, name, **changes):
    fixed = {
        "output_dir": str(OUT / name),
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "seed": 3,
        "ddp_backend": "gloo",
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(**{**fixed, **changes})


def causal():
    return AutoModelForCausalLM.from_pretrained(START / "policy")


def reward_model():
    return AutoModelForSequenceClassification.from_pretrained(START / "reward", num_labels=1)


def data(kind):
    return load_from_disk(START / kind)


def sft(name, **changes):
    args = arguments(trl.SFTConfig, name, max_length=16, **changes)
    return trl.SFTTrainer, args, {"model": causal(), "train_dataset": data("sentences")}


def dpo(name, **changes):
    args = arguments(trl.DPOConfig, name, max_length=16, **changes)
    return trl.DPOTrainer, args, {"model": causal(), "train_dataset": data("preferences")}


def kto(name, **changes):
    args = arguments(trl.KTOConfig, name, max_length=16, **changes)
    return trl.KTOTrainer, args, {"model": causal(), "train_dataset": data("unpaired")}


def reward(name, **changes):
    args = arguments(trl.RewardConfig, name, max_length=16, **changes)
    return trl.RewardTrainer, args, {"model": reward_model(), "train_dataset": data("preferences")}


def online(config, trainer, judge=lambda: lengths):
    def make(name, **changes):
        settings = {"num_generations": 2, "max_completion_length": 12, "beta": 0.04, "temperature": 1.0}
        args = arguments(config, name, **{**settings, **changes})
        prompts = data("preferences").select_columns("prompt")
        data_arguments = {"train_dataset": prompts, "eval_dataset": prompts.select(range(8))}
        return trainer, args, {"model": causal(), "reward_funcs": judge(), **data_arguments}

    return make


def with_adapters(make):
    def made(name, **changes):
        trainer, args, data_arguments = make(name, **changes)
        targets = ["q_proj", "v_proj"]
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
        return trainer, args, {**data_arguments, "peft_config": adapters}

    return made


grpo = online(trl.GRPOConfig, trl.GRPOTrainer)
CASES = {
    "sft": (sft, {}),
    "sft-lora": (with_adapters(sft), {}),
    "dpo": (dpo, {}),
    "dpo-sync": (dpo, {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "dpo-precompute": (dpo, {"precompute_ref_log_probs": True}),
    "kto": (kto, {}),
    "kto-precompute": (kto, {"precompute_ref_log_probs": True}),
    "reward": (reward, {}),
    "grpo": (grpo, {}),
    "grpo-evaluate": (grpo, {}),
    "grpo-lora": (with_adapters(grpo), {}),
    "grpo-judge": (online(trl.GRPOConfig, trl.GRPOTrainer, reward_model), {}),
    "grpo-ungathered": (grpo, {"ds3_gather_for_generation": False}),
    "grpo-sync-ungathered": (
        grpo,
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "ds3_gather_for_generation": False},
    ),
    "rloo": (online(trl.RLOOConfig, trl.RLOOTrainer), {}),
    "rloo-judge": (online(trl.RLOOConfig, trl.RLOOTrainer, reward_model), {}),
}


def run(case):
    name, stage = case.rsplit("-", 1)
    zero = {"stage": int(stage)}
    if stage == "3":
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    file = OUT / f"{case}-{os.environ['RANK']}.json"
    file.write_text(json.dumps(config))
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
    # One script after the other: what Accelerate keeps of the one before is forgotten.
    AcceleratorState._reset_state()
    GradientState._reset_state()
    make, changes = CASES[name]
    set_seed(3)
    trainer, args, data_arguments = make(case, **changes)
    tokenizer = AutoTokenizer.from_pretrained(START / "policy")
    made = trainer(args=args, processing_class=tokenizer, callbacks=[SeedsEveryStep()], **data_arguments)
    if name.endswith("-evaluate"):  # before any training the engine has no optimizer
        set_seed(args.process_index)
        metrics = made.evaluate()
        return {"history": [{key.removeprefix("eval_"): value for key, value in metrics.items()}]}
    made.train()
    found = {"history": [entry for entry in made.state.log_history if "grad_norm" in entry]}
    if name == "grpo":
        found["generated"] = generated(made)
    return found


def generated(trainer):
    """Completions of a length that each rank chooses for itself, and logits after them."""
    rank, probe = trainer.args.process_index, torch.tensor([[3, 4, 5]])
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        settings = {"do_sample": False, "synced_gpus": False, "eos_token_id": None}
        ids = model.generate(probe, max_new_tokens=2 + 5 * rank, **settings)
    trainer.model_wrapped.eval()
    with torch.no_grad():
        logits = trainer.model_wrapped(input_ids=probe).logits
    ids = trainer.accelerator.pad_across_processes(ids, dim=1, pad_index=0)
    return trainer.accelerator.gather(ids).tolist(), logits.flatten().tolist()


def main():
    gc.freeze()  # collections, which the libraries ask for, leave out what was imported
    found = {}
    for case in sys.argv[3:]:
        found[case] = run(case)
        if os.environ["RANK"] == "0":
            (OUT / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
