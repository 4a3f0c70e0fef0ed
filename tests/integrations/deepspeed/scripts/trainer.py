"""An ordinary Hugging Face script: ``trainer.py CASES.json MODEL_FOLDER OUT_FOLDER``.

It knows nothing of zero_ext or DeepSpeed. Each case is a training of its own. The engine's JSON comes from
TrainingArguments, or from the environment as 'accelerate launch' sets it. Uploads become copies in a folder.
"""

import fnmatch
import gc
import json
import os
import shutil
import sys
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

SECONDS = 120


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 97, (64, 16), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def push_to(hub):
    """Uploads of this process go to the folder ``hub``."""

    def create_repo(self, repo_id, **_):
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns=(), path_in_repo="", **_):
        for path in Path(folder_path).rglob("*"):
            name = str(path.relative_to(folder_path))
            if path.is_file() and not any(fnmatch.fnmatch(name, each) for each in ignore_patterns):
                put(path, hub / repo_id / path_in_repo / name)
        done = Future()
        done.set_result(None)
        return done

    def create_commit(self, *, repo_id, operations, **_):
        for each in operations:
            put(each.path_or_fileobj, hub / repo_id / each.path_in_repo)

    huggingface_hub.HfApi.create_repo = create_repo
    huggingface_hub.HfApi.upload_folder = upload_folder
    huggingface_hub.HfApi.create_commit = create_commit
    huggingface_hub.RepoCard.validate = lambda *_, **__: None


def put(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def arguments_of(settings, out):
    AcceleratorState._reset_state(True)
    if "deepspeed" in settings:
        # On a machine without an accelerator TrainingArguments(deepspeed=...) alone sees one rank.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo", timeout=timedelta(seconds=SECONDS))
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        settings = {**settings, "accelerator_config": {"use_configured_state": True}}
    return TrainingArguments(
        output_dir=str(out / "run"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_steps=3,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        warmup_steps=2,
        max_grad_norm=0.7,
        seed=3,
        ddp_backend="gloo",
        ddp_timeout=SECONDS,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        push_to_hub=True,
        hub_model_id="me/trainer",
        hub_strategy="every_save",
        **settings,
    )


def model_of(kind, start):
    if kind == "from_pretrained":
        model = LlamaForCausalLM.from_pretrained(start)
        model.resize_token_embeddings(100, mean_resizing=False)
        return model
    config = LlamaConfig.from_pretrained(start)
    return LlamaForCausalLM(config) if kind == "constructor" else AutoModelForCausalLM.from_config(config)


def trainer_of(case, start, out):
    os.environ.update(case["environment"])
    arguments = arguments_of(case["arguments"], out)
    set_seed(3)
    model = model_of(case["model"], start)  # under ZeRO-3 sharded as it is made, unless by the constructor
    return Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())


def history_of(trainer):
    keys = ("loss", "learning_rate", "grad_norm")
    return [[entry.get(key) for key in keys] for entry in trainer.state.log_history if "loss" in entry]


def run(case, start, out):
    push_to(out / "hub")
    trainer = trainer_of(case, start, out)
    trainer.train()
    found = {"history": history_of(trainer), "engine": type(trainer.model_wrapped).__module__}
    found["eval"] = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(out / "saved"))
    trainer.model.save_pretrained(str(out / "pretrained"))
    trainer.push_to_hub()
    trainer.model.push_to_hub("me/model")
    probe = Tokens()[0]["input_ids"][None]
    found["generated"] = trainer.model.generate(probe, max_new_tokens=4, do_sample=False).tolist()
    resumed = trainer_of(case, start, out)
    resumed.train(resume_from_checkpoint=str(out / "run" / "checkpoint-2"))
    found["resumed"] = history_of(resumed)
    resumed.save_model(str(out / "resumed"))
    for name in case["environment"]:
        del os.environ[name]
    return found


def main():
    gc.freeze()  # collections, which the libraries ask for, leave out what was imported
    cases, start, out = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], Path(sys.argv[3])
    found = {name: run(case, start, out / name) for name, case in cases.items()}
    if os.environ["RANK"] == "0":
        (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
