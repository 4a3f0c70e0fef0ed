"""An ordinary script, ``libraries.py OUT_FOLDER``: checkpoints of a Trainer, of Accelerate and of Lightning,
read by the functions that those libraries name. It knows nothing of zero_ext."""

import json
import sys
from pathlib import Path

import deepspeed
import lightning
import torch
from deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=32, tie_word_embeddings=True)


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 61, (32, 12), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Module(lightning.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, inputs):
        return self.inner(inputs).square().mean()


def same(found, wanted):
    """Whether the tensors that both have are equal, and none of the first is missing."""
    return found.keys() <= wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def trained(out):
    arguments = TrainingArguments(
        output_dir=str(out / "run"),
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        # The best one is to be the first and not the last.
        metric_for_best_model="loss",
        greater_is_better=True,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(3)
    trainer = Trainer(
        model=LlamaForCausalLM(CONFIG), args=arguments, train_dataset=Tokens(), eval_dataset=Tokens()
    )
    trainer.train()
    return trainer


def of_trainer(out, trainer):
    best, last = Path(trainer.state.best_model_checkpoint), out / "run" / "checkpoint-4"
    engine = trainer.model_wrapped
    found = {
        "best": best.name,
        "best loaded": same(get_fp32_state_dict_from_zero_checkpoint(best), full_state(engine)),
    }
    values = get_fp32_state_dict_from_zero_checkpoint(last)
    found["moved on"] = not same(values, full_state(engine))
    found["keys"] = sorted(values) == sorted(LlamaForCausalLM(CONFIG).state_dict())
    plain = load_state_dict_from_zero_checkpoint(LlamaForCausalLM(CONFIG), last)
    found["plain model"] = same(values, plain.state_dict())
    load_state_dict_from_zero_checkpoint(trainer.model, last)
    found["trainer.model"] = same(values, full_state(engine))
    return found


def of_accelerate(out, accelerator, engine):
    accelerator.save_state(str(out / "state"))
    model = load_state_dict_from_zero_checkpoint(LlamaForCausalLM(CONFIG), out / "state")
    return same(model.state_dict(), full_state(engine))


def of_lightning(out):
    torch.manual_seed(7)
    model = Module(6)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.backward(engine(torch.ones(2, 6)))
    engine.step()
    # As Lightning's strategy does it.
    client = {"hyper_parameters": dict(model.hparams), "pytorch-lightning_version": lightning.__version__}
    engine.save_checkpoint(str(out / "lightning.ckpt"), client_state={**client, "epoch": 2}, tag="checkpoint")
    values = full_state(engine)
    if deepspeed.comm.get_rank() != 0:
        return {}
    file = out / "lightning.pt"
    made = convert_zero_checkpoint_to_fp32_state_dict(out / "lightning.ckpt", file)
    loaded = Module.load_from_checkpoint(file, map_location="cpu", weights_only=True)
    return {
        "epoch": made["epoch"],
        "steps": "global_steps" in made,
        "values": same(values, loaded.state_dict()),
    }


def full_state(engine):
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def main():
    out = Path(sys.argv[1])
    trainer = trained(out)
    found = {"trainer": of_trainer(out, trainer)}
    found["accelerate"] = of_accelerate(out, trainer.accelerator, trainer.model_wrapped)
    found["lightning"] = of_lightning(out)
    if deepspeed.comm.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
