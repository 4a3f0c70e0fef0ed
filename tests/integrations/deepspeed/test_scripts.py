"""Scripts that know nothing of zero_ext, under the DeepSpeed that is installed and under the look-alike."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integrations.launch import REAL, RUN, found_in, started

SCRIPTS = Path(__file__).parent / "scripts"
SOURCES = ("argument", "environment", "launch")


def under_real(script: str, *arguments: object, **environment: object) -> None:
    started([*RUN, REAL, SCRIPTS / script, *arguments], **environment)


def under_import_alias(script: str, *arguments: object, **environment: object) -> None:
    started([*RUN, "--deepspeed-compat", SCRIPTS / script, *arguments], **environment)


def under_both(folder: Path, script: str, *arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a script finds under the installed DeepSpeed and under the look-alike, in folders of their own."""
    for name, run in (("real", under_real), ("ours", under_import_alias)):
        (folder / name).mkdir()
        run(script, *arguments, folder / name)
    real, ours = found_in(folder / "real"), found_in(folder / "ours")
    assert "site-packages/deepspeed/" in real.pop("file")
    assert ours.pop("file").endswith("zero_ext/integrations/deepspeed/__init__.py")
    return real, ours


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
    real, ours = under_both(tmp_path, "plain.py", configs)
    for name, theirs in real.items():
        own, exact = ours[name], name.startswith("fp32")
        # bf16: DeepSpeed adds gradients of micro-batches and ranks in bf16, this engine in fp32.
        assert own["losses"] == pytest.approx(theirs["losses"], rel=1e-6 if exact else 4e-3), name
        assert own["norm"] == pytest.approx(theirs["norm"], rel=1e-5 if exact else 2e-2), name
        assert own["again"] == own["losses"][-4:], name
        assert own["losses"][-1] < own["losses"][0]
        assert own["lr"] == pytest.approx(theirs["lr"]), name
        for key in ("global_steps", "client", "latest"):
            assert own[key] == theirs[key], name


def test_a_pipeline_trains_alike(tmp_path: Path) -> None:
    real, ours = under_both(tmp_path, "pipeline.py")
    for name, theirs in real.items():
        own = ours[name]
        assert own["losses"] == pytest.approx(theirs["losses"], rel=1e-6), name
        assert own["again"] == own["losses"][-2:] and own["losses"][3] < own["losses"][0]
        assert own["evaluated"] == pytest.approx(theirs["evaluated"], rel=1e-6), name
        assert own["lr"] == pytest.approx(theirs["lr"])
        for key in ("refused", "parts", "stage", "batch"):
            assert own[key] == theirs[key], name


WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ADAMW = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
HUGGING_FACE_JSON: dict[str, Any] = {
    **dict.fromkeys((*SIZES, "gradient_clipping"), "auto"),
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": ADAMW},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(WARMUP, "auto")},
    "zero_optimization": {
        "stage": 3,
        **dict.fromkeys(("overlap_comm", "contiguous_gradients"), True),
        **dict.fromkeys(("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 1e9),
        **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}
# torch's: the real one would have to compile its own.
TORCH_ADAMW = {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}}


def environment_of(path: Path, config: dict[str, Any]) -> dict[str, str]:
    path.write_text(json.dumps(config))
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_MIXED_PRECISION": "no",
    }


def trainer_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Each way to give the JSON at each stage, and each way to make the model beside each of both."""
    models = ("constructor", "from_config", "from_pretrained")
    cases: dict[str, dict[str, Any]] = {}
    for number, (source, stage) in enumerate(itertools.product(SOURCES, range(4))):
        config = trainer_config(stage)
        path = folder / f"{source}-{stage}.json"
        path.write_text(json.dumps(config))
        case: dict[str, Any] = {"arguments": {}, "environment": {}}
        if source == "argument":
            case["arguments"]["deepspeed"] = config if stage % 2 else str(path)
        elif source == "environment":
            case["environment"] = environment_of(path, config | TORCH_ADAMW)
        else:
            case["environment"] = launched_environment(stage)
        cases[f"{source}-{stage}"] = {**case, "model": models[(number + number // 4) % 3]}
    return cases


def trainer_config(stage: int) -> dict[str, Any]:
    config = {key: value for key, value in HUGGING_FACE_JSON.items() if key != "optimizer"}
    return config if stage == 3 else config | {"zero_optimization": {"stage": stage}}


def launched_environment(stage: int) -> dict[str, str]:
    """What 'accelerate launch' makes of a configuration file without a JSON."""
    third = str(stage == 3).lower()
    plugin = {
        "ZERO_STAGE": str(stage),
        "OFFLOAD_OPTIMIZER_DEVICE": "none",
        "OFFLOAD_PARAM_DEVICE": "none",
        "ZERO3_INIT": third,
        "ZERO3_SAVE_16BIT_MODEL": third,
    }
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_GRADIENT_CLIPPING": "0.7",
        **{f"ACCELERATE_DEEPSPEED_{name}": value for name, value in plugin.items()},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which ``real`` and ``ours`` hold what the script left under each of the two."""
    folder = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / "start")
    (folder / "cases.json").write_text(json.dumps(trainer_cases(folder)))
    for name, run in (("real", under_real), ("ours", under_import_alias)):
        (folder / name).mkdir()
        run("trainer.py", folder / "cases.json", folder / "start", folder / name)
    return folder


def files_below(folder: Path) -> set[str]:
    """Names of all files but those in the folders of DeepSpeed's checkpoints, whose format is its own."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "/global_step" not in name}


@pytest.mark.parametrize("name", [f"{source}-{stage}" for source in SOURCES for stage in range(4)])
def test_an_unmodified_trainer_script(trained: Path, name: str) -> None:
    real, ours = (found_in(trained / each)[name] for each in ("real", "ours"))
    assert real["engine"].startswith("deepspeed.") and ours["engine"].startswith("zero_ext.")
    assert len(ours["history"]) == 3
    for own, theirs in zip(ours["history"], real["history"], strict=True):
        assert own[:2] == pytest.approx(theirs[:2], rel=1e-5)
        if theirs[2] is not None:  # without ZeRO DeepSpeed's engine gives no norm
            assert own[2] == pytest.approx(theirs[2], rel=1e-5)
    assert ours["eval"] == pytest.approx(real["eval"], rel=1e-5)
    assert ours["generated"] == real["generated"]
    assert ours["resumed"] == ours["history"]  # of which the first two come from the checkpoint
    wanted = load_file(trained / "real" / name / "saved" / "model.safetensors")
    out = trained / "ours" / name
    for folder in ("saved", "pretrained", "resumed", "hub/me/trainer", "hub/me/model"):
        written = load_file(out / folder / "model.safetensors")
        torch.testing.assert_close({folder: written}, {folder: wanted}, rtol=1e-5, atol=1e-6)
    for folder in ("saved", "pretrained", "hub"):
        assert files_below(out / folder) == files_below(trained / "real" / name / folder), folder
    assert files_below(out / "run") >= files_below(trained / "real" / name / "run")
    plain = LlamaForCausalLM.from_pretrained(out / "saved")
    probe = torch.tensor(ours["generated"])
    assert plain.generate(probe[:, :16], max_new_tokens=4, do_sample=False).tolist() == ours["generated"]
