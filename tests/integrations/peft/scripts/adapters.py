"""PEFT under Accelerate as its DeepSpeed examples run it: ``adapters.py INPUT_FOLDER OUT_FOLDER CASE...``.

The engine and its settings come from the environment, as 'accelerate launch' sets it.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs, set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, get_linear_schedule_with_warmup

START, OUT = Path(sys.argv[1]), Path(sys.argv[2])


def lora(kind="SEQ_2_SEQ_LM", **changes):
    return LoraConfig(task_type=kind, **{"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **changes})


def data():
    ids = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row.flip(0)} for row in ids]


CAUSAL = {"kind": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
CASES = {
    "bart": (AutoModelForSeq2SeqLM, lambda: lora()),
    "llama": (AutoModelForCausalLM, lambda: lora(**CAUSAL, modules_to_save=["lm_head"])),
    "dora": (AutoModelForCausalLM, lambda: lora(**CAUSAL, use_dora=True)),
    "pissa": (AutoModelForCausalLM, lambda: lora(**CAUSAL, init_lora_weights="pissa")),
    "whole": (AutoModelForCausalLM, None),
}


def run(case):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    kind, config = CASES[case]
    set_seed(42)
    loader = DataLoader(data(), batch_size=2)
    model = kind.from_pretrained(START / ("bart" if case == "bart" else "llama"))
    if config is not None:
        model = get_peft_model(model, config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader))
    model, loader, optimizer, schedule = accelerator.prepare(model, loader, optimizer, schedule)
    losses = []
    for _ in range(2):
        model.train()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    model.eval()
    unwrapped = accelerator.unwrap_model(model)
    prompts = [row["input_ids"][: 3 + rank].tolist() for rank, row in enumerate(data()[:2])]
    prompt = torch.tensor([prompts[accelerator.process_index]])
    with torch.no_grad():
        made = unwrapped.generate(input_ids=prompt, synced_gpus=True, do_sample=False, max_new_tokens=5)
    made = accelerator.pad_across_processes(made, dim=1, pad_index=0)
    state = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(OUT / case, state_dict=state, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    model.save_pretrained(OUT / f"{case}-by-every-rank")
    accelerator.wait_for_everyone()
    return {
        "engine": type(model).__module__,
        "losses": losses,
        "prompts": prompts,
        "generated": accelerator.gather(made).tolist(),
    }


def main():
    gc.freeze()  # collections, which the libraries ask for, leave out what was imported
    found = {}
    for case in sys.argv[3:]:
        found[case] = run(case)
        if os.environ["RANK"] == "0":
            (OUT / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
