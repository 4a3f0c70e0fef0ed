"""Mixtures of experts in plans and simulations: what spreading them changes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import run, run_json
from zero_ext.config import CommunicationConfig
from zero_ext.plan import Sent, expert_exchange_bytes
from zero_ext.plan.models import ModelSpec, model_named
from zero_ext.plan.simulation import MACHINES, Training, simulate
from zero_ext.plan.simulation.run_memory import memory_needs
from zero_ext.plan.simulation.simulate import estimate_step, sent_in_step, simulated, tokens_sent
from zero_ext.plan.simulation.task_timeline import LINK

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QWEN = {**MIXTRAL, "model_type": "qwen3_moe", "moe_intermediate_size": 768, "head_dim": 128}
MACHINE = MACHINES["dgx-h100"]


def written(folder: Path, values: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.fixture
def mixtral(tmp_path: Path) -> ModelSpec:
    return model_named(written(tmp_path, MIXTRAL))


EXPERTS, TABLE = 32 * 8 * 3 * 4096 * 14336, 32000 * 4096


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_state_of_spread_experts(mixtral: ModelSpec, ep: int, stage: int) -> None:
    """On 16 GPUs sharded state has as many bytes for any ``ep``, and other state is that of local experts."""
    model = mixtral.with_experts_over(ep).full_cost
    needs = memory_needs(model, Training(16, stage=stage), MACHINE).device
    total, rest = mixtral.parameters, mixtral.parameters - EXPERTS
    own = rest + EXPERTS // ep
    expected = {"params": 2 * own, "grads": 2 * own, "optimizer": 12 * total / 16}
    if stage >= 2:
        expected["grads"] = 2 * total / 16
    if stage == 3:
        expected["params"] = 2 * total / 16
    for kind, nbytes in expected.items():
        assert needs[kind] == pytest.approx(nbytes, rel=1e-3), kind


def test_a_step_sends_less_of_experts_and_more_of_tokens(mixtral: ModelSpec) -> None:
    """Stage 3 gathers and reduces a share of the experts over a share of the ranks. It gathers the embedding
    and the output matrix once."""
    training, policy = Training(16, activations="saved"), CommunicationConfig()
    rest = mixtral.parameters - EXPERTS
    for ep in (1, 2, 4, 8):
        model = mixtral.with_experts_over(ep).full_cost
        tokens = tokens_sent(model, training).all
        assert tokens == 32 * 4 * 4096 * (2 * 2 * 4096) * (ep - 1) // ep
        own = 16 // ep
        expected = 3 * 2 * (rest * 15 / 16 + EXPERTS / ep * (own - 1) / own)
        expected -= 2 * 2 * TABLE * 15 / 16
        assert sent_in_step(model, training, policy).all - tokens == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("ep", "recomputed", "per_node", "expected"),
    [
        (1, False, None, Sent(0, 0)),
        (4, False, None, Sent(4 * 10 * 6, 0)),
        (4, True, None, Sent(6 * 10 * 6, 0)),
        (4, False, 2, Sent(4 * 10 * 6, 4 * 10 * 4)),
        (4, False, 8, Sent(4 * 10 * 6, 0)),
    ],
)
def test_exchanged_bytes(ep: int, recomputed: bool, per_node: int | None, expected: Sent) -> None:
    """Ten tokens of eight bytes, two bytes for each of four ranks."""
    assert expert_exchange_bytes(10, 8, ep, recomputed=recomputed, ranks_per_node=per_node) == expected


def test_flops_are_those_of_active_parameters(mixtral: ModelSpec) -> None:
    training = Training(8, activations="saved")
    attention = 32 * 4 * 4096 * 4096  # scores and values of all layers, per token
    vectors = (2 * 32 + 1) * 4096
    expected = 3 * 4096 * (2 * (mixtral.active_parameters - TABLE - vectors) + attention)
    for ep in (1, 8):
        found = simulate(mixtral.with_experts_over(ep).full_cost, training, MACHINE)
        assert found.model_flops == pytest.approx(expected, rel=1e-6)


def test_exchanges_use_the_link(mixtral: ModelSpec) -> None:
    """Where experts are on one rank each, the link carries their tokens and no parameters of theirs."""
    for activations, exchanges in (("saved", 4), ("recomputed", 6)):
        training = Training(8, activations=activations)
        model = mixtral.with_experts_over(8).full_cost
        dense = [unit.parameters for unit in model.units if unit.spread == 1]
        found = simulate(model, training, MACHINE)
        rates = MACHINE.for_rank(8)
        tokens = 32 * exchanges * 4096 * 2 * 2 * 4096 * 7 / 8 / rates.collective
        assert found.busy[LINK] >= tokens
        gathered = 3 * sum(dense) * 2 * 7 / 8 / rates.collective
        latencies = (32 * exchanges + 3 * len(dense)) * rates.latency
        assert found.busy[LINK] == pytest.approx(tokens + gathered + latencies, rel=0.05)


def test_deep_models_are_continued_from_shallow_ones(tmp_path: Path) -> None:
    """Two dense layers, and 46 with experts, which are two units each."""
    values = {**QWEN, "num_hidden_layers": 48, "num_experts": 8, "mlp_only_layers": [0, 1]}
    model = model_named(written(tmp_path, values)).with_experts_over(4).full_cost
    for activations in ("saved", "recomputed"):
        training = Training(8, activations=activations)
        exact = simulate(model, training, MACHINE).seconds
        assert simulated(model, training, MACHINE)[0] == pytest.approx(exact, rel=0.02)
    assert estimate_step(model, training, MACHINE).sent > 0


def test_the_plan_of_a_mixture(tmp_path: Path) -> None:
    folder = written(tmp_path, MIXTRAL)
    text = run("plan", folder, "--gpus", "16", "--ep", "8", "--machine", "dgx-h100")
    assert "46,702,792,704 parameters, 12,879,925,248 of them per token" in " ".join(text.split())
    assert "experts of each layer are spread over 8 ranks" in " ".join(text.split())
    found = run_json("plan", folder, "--gpus", "16", "--ep", "8", "--machine", "dgx-h100", "--json")
    assert found["ep"] == 8
    assert found["model"]["active_parameters"] == 12_879_925_248
    simulated_steps = run_json("simulate", folder, "--gpus", "16", "--ep", "8", "--json")["placements"]
    assert simulated_steps


def test_what_does_not_fit_says_how_many_gpus_would(tmp_path: Path) -> None:
    folder = written(tmp_path, MIXTRAL)
    text = run(
        "plan", folder, "--gpus", "6", "--gpus-per-host", "6", "--ep", "2", "--gpu-memory", "8GB",
        "--host-memory", "8GB", "--nvme", "0", status=1,
    )  # fmt: skip
    assert "GPUs of" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ep", "3", "--gpus", "8"), "--ep: expected a divisor of the 8 GPUs, got 3"),
        (("--ep", "16", "--gpus", "16"), "ep: expected a divisor of the 8 experts of a layer, got 16"),
        (("--3d", "pp=2"), "--3d: expected a model without experts"),
        (("--3d", "best"), "--3d: expected a model without experts"),
        (("--optimizer", "muon"), "optimizer_type: expected one that steps elements by themselves"),
        (("--optimizer", "adafactor"), "optimizer_type: expected one that steps elements by themselves"),
    ],
)
def test_plans_that_are_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    text = run("plan", written(tmp_path, MIXTRAL), *options, status=2)
    assert words in " ".join(text.split())


def test_dense_models_have_no_experts_to_spread() -> None:
    with pytest.raises(ValueError, match="ep: expected 1 for llama-7b, which has no mixture of experts"):
        model_named("llama-7b").with_experts_over(2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts: the required key is missing"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, r"num_experts_per_tok: expected at most .* \(8\), got 9"),
        (
            {**MIXTRAL, "model_type": "llama"},
            "num_local_experts: experts are planned for in mixtral, .* llama",
        ),
        ({**MIXTRAL, "model_type": "gpt_oss"}, "model_type: expected one of llama.*, got 'gpt_oss'"),
        ({**QWEN, "mlp_only_layers": [True]}, "mlp_only_layers: expected a list of numbers of layers"),
        ({**QWEN, "moe_intermediate_size": 0}, "moe_intermediate_size: expected an integer from 1"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_named(written(tmp_path, values))
