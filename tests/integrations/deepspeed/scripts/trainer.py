"""An ordinary Hugging Face script: ``trainer.py MODEL_FOLDER OUT_FOLDER``. It knows nothing of zero_ext or
DeepSpeed.

The engine and its JSON come from the environment, as 'accelerate launch' sets it.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 97, (64, 16), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments_of(out):
    return TrainingArguments(
        output_dir=str(out / "run"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=6,
        save_steps=4,
        logging_steps=1,
        warmup_steps=2,
        max_grad_norm=0.7,
        seed=3,
        ddp_backend="gloo",
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )


def trainer_of(start, out):
    arguments = arguments_of(out)
    set_seed(3)
    # Born sharded under ZeRO-3, weights streamed in from files.
    model = LlamaForCausalLM.from_pretrained(start)
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def losses_of(trainer):
    return [
        [entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "grad_norm" in entry
    ]


def main():
    start, out = sys.argv[1], Path(sys.argv[2])
    trainer = trainer_of(start, out)
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(str(out / "saved"))
    probe = Tokens()[0]["input_ids"][None]
    trainer.model_wrapped.eval()
    with torch.no_grad():
        logits = trainer.model_wrapped(input_ids=probe).logits
    generated = trainer.model.generate(probe, max_new_tokens=4, do_sample=False)
    found = {
        "losses": losses_of(trainer),
        "eval": evaluated["eval_loss"],
        "logits": logits.tolist(),
        "generated": generated.tolist(),
        "engine": type(trainer.model_wrapped).__module__,
    }
    resumed = trainer_of(start, out)
    resumed.train(resume_from_checkpoint=str(out / "run" / "checkpoint-4"))
    found["resumed"] = losses_of(resumed)
    if trainer.is_world_process_zero():
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
