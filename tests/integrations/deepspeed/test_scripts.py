"""Scripts that know nothing of zero_ext, under the DeepSpeed that is installed and under the look-alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]
RUN = [sys.executable, "-m", "zero_ext.cli", "run", "--standalone", "--nproc-per-node", "2"]
SECONDS = 600


def launch(arguments: list[object], **environment: object) -> None:
    """``zero-ext run`` of two ranks."""
    extra = {name: str(value) for name, value in environment.items()}
    quiet = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [*RUN, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **quiet, **extra},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def under_real(script: str, *arguments: object, **environment: object) -> None:
    launch([SCRIPTS / "real.py", SCRIPTS / script, *arguments], **environment)


def under_look_alike(script: str, *arguments: object, **environment: object) -> None:
    launch(["--deepspeed-compat", SCRIPTS / script, *arguments], **environment)


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def plain_configs() -> dict[str, dict[str, Any]]:
    configs = {}
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16"):
            zero: dict[str, Any] = {"stage": stage}
            if stage == 3:
                zero["stage3_param_persistence_threshold"] = 0
            configs[f"{dtype}-{stage}"] = {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.5,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": zero,
                "bf16": {"enabled": dtype == "bf16"},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.005, "warmup_num_steps": 3}},
            }
    return configs


def test_a_plain_script_trains_alike(tmp_path: Path) -> None:
    configs = tmp_path / "configs.json"
    configs.write_text(json.dumps(plain_configs()))
    for name, run in (("real", under_real), ("ours", under_look_alike)):
        (tmp_path / name).mkdir()
        run("plain.py", configs, tmp_path / name)
    real, ours = found_in(tmp_path / "real"), found_in(tmp_path / "ours")
    assert "site-packages/deepspeed/" in real.pop("file")
    assert ours.pop("file").endswith("zero_ext/integrations/deepspeed/__init__.py")
    for name, theirs in real.items():
        own = ours[name]
        # bf16: DeepSpeed adds gradients of micro-batches and ranks in bf16, this engine in fp32.
        tolerance = 1e-6 if name.startswith("fp32") else 4e-3
        assert own["losses"] == pytest.approx(theirs["losses"], rel=tolerance), name
        assert own["norm"] == pytest.approx(theirs["norm"], rel=1e-5 if name.startswith("fp32") else 2e-2), (
            name
        )
        assert own["again"] == own["losses"][-4:], name
        assert own["losses"][-1] < own["losses"][0]
        for key in ("lr", "global_steps", "client", "latest"):
            assert own[key] == pytest.approx(theirs[key]) if key == "lr" else own[key] == theirs[key], name


def test_a_pipeline_trains_alike(tmp_path: Path) -> None:
    for name, run in (("real", under_real), ("ours", under_look_alike)):
        (tmp_path / name).mkdir()
        run("pipeline.py", tmp_path / name)
    real, ours = found_in(tmp_path / "real"), found_in(tmp_path / "ours")
    assert "site-packages/deepspeed/" in real.pop("file")
    assert ours.pop("file").endswith("zero_ext/integrations/deepspeed/__init__.py")
    for name, theirs in real.items():
        own = ours[name]
        assert own["losses"] == pytest.approx(theirs["losses"], rel=1e-6), name
        assert own["again"] == own["losses"][-2:] and own["losses"][3] < own["losses"][0]
        assert own["evaluated"] == pytest.approx(theirs["evaluated"], rel=1e-6), name
        assert own["lr"] == pytest.approx(theirs["lr"])
        for key in ("refused", "parts", "stage", "batch"):
            assert own[key] == theirs[key], name


HUGGING_FACE_JSON: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def environment_of(path: Path, config: dict[str, Any]) -> dict[str, object]:
    path.write_text(json.dumps(config))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": path,
        "ACCELERATE_MIXED_PRECISION": "no",
    }


def test_an_unmodified_trainer_script(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path / "start")
    # The real one would have to compile its AdamW; given none it trains with Hugging Face's.
    without_optimizer = {key: value for key, value in HUGGING_FACE_JSON.items() if key != "optimizer"}
    cases = (("real", under_real, without_optimizer), ("ours", under_look_alike, HUGGING_FACE_JSON))
    for name, run, config in cases:
        (tmp_path / name).mkdir()
        variables = environment_of(tmp_path / f"{name}.json", config)
        run("trainer.py", tmp_path / "start", tmp_path / name, **variables)
    real, ours = found_in(tmp_path / "real"), found_in(tmp_path / "ours")
    assert real["engine"].startswith("deepspeed.") and ours["engine"].startswith("zero_ext.")
    assert len(ours["losses"]) == 6
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(real["losses"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        torch.tensor(ours["logits"]), torch.tensor(real["logits"]), rtol=1e-3, atol=1e-5
    )
    assert ours["eval"] == pytest.approx(real["eval"], rel=1e-5)
    assert ours["generated"] == real["generated"]
    assert ours["resumed"] == ours["losses"]  # of which the first four come from the checkpoint
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "saved")
    probe = torch.tensor(ours["generated"])[:, :16]
    with torch.no_grad():
        logits = saved(input_ids=probe).logits
    torch.testing.assert_close(logits, torch.tensor(ours["logits"]), rtol=1e-6, atol=1e-7)
