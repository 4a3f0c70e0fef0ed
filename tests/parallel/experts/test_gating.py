"""Routing and the balance loss against loops in float64; a mixture in one process against its experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from zero_ext.parallel.experts import MixtureOfExperts, balance_loss, route


def routed(
    logits: torch.Tensor, top_k: int, capacity: float
) -> tuple[list[tuple[int, int, float]], list[int], torch.Tensor]:
    """(choice, token, weight) of each choice with room, by expert; choices of each expert; probabilities."""
    probabilities = torch.softmax(logits.double(), -1)
    tokens, experts = logits.shape
    routed_tokens: list[list[tuple[int, int, float]]] = [[] for _ in range(experts)]
    for choice in range(top_k):
        for token in range(tokens):
            best = sorted(range(experts), key=lambda e: -float(probabilities[token, e]))[:top_k]
            share = sum(float(probabilities[token, e]) for e in best) if top_k > 1 else 1.0
            if len(routed_tokens[best[choice]]) < capacity:
                weight = float(probabilities[token, best[choice]]) / share
                routed_tokens[best[choice]].append((choice, token, weight))
    return [each for own in routed_tokens for each in own], [len(own) for own in routed_tokens], probabilities


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(37, 6, 2), (50, 4, 1), (16, 5, 3), (0, 4, 2)])
@pytest.mark.parametrize("capacity_factor", [None, 0.6, 1.25])
def test_routes_are_those_of_loops(
    tokens: int, experts: int, top_k: int, capacity_factor: float | None
) -> None:
    logits = torch.randn(tokens, experts)
    capacity = math.inf if capacity_factor is None else math.ceil(capacity_factor * top_k * tokens / experts)
    wanted, counts, probabilities = routed(logits, top_k, capacity)
    found = route(logits, top_k, capacity_factor)
    assert found.order.tolist() == [choice * tokens + token for choice, token, _ in wanted]
    assert found.counts.tolist() == counts
    weights = torch.tensor([weight for _, _, weight in wanted], dtype=torch.float64)
    torch.testing.assert_close(found.weights.reshape(-1)[found.order].double(), weights, rtol=1e-5, atol=0)
    first = torch.bincount(probabilities.argmax(-1), minlength=experts)
    assert found.first_choices.tolist() == first.tolist()
    aux_loss = sum(
        float(first[e]) / tokens * float(probabilities[:, e].mean()) * experts
        for e in range(experts)
        if tokens
    )
    assert float(balance_loss(first, found.probabilities)) == pytest.approx(aux_loss, rel=1e-5)


def test_logits_are_judged_in_float32() -> None:
    logits = torch.randn(100, 8).bfloat16()
    found = route(logits)
    assert found.probabilities.dtype == found.weights.dtype == torch.float32
    torch.testing.assert_close(found.probabilities.sum(-1), torch.ones(100), rtol=1e-6, atol=0)


def test_a_balanced_gate_has_the_loss_one_and_busy_experts_cost_more() -> None:
    even = torch.full((12, 4), 0.25)
    assert float(balance_loss(torch.tensor([3, 3, 3, 3]), even)) == 1.0
    logits = torch.randn(12, 4, requires_grad=True)
    loss = balance_loss(torch.tensor([12, 0, 0, 0]), torch.softmax(logits, -1))
    loss.backward()
    assert logits.grad is not None and bool((logits.grad[:, 0] > 0).all())


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_a_mixture_adds_up_its_experts(capacity_factor: float | None) -> None:
    width, count, shape = 6, 5, (3, 7, 6)
    experts = [nn.Linear(width, width) for _ in range(count)]
    mixture = MixtureOfExperts(width, experts, capacity_factor=capacity_factor)
    hidden, cotangent = torch.randn(shape, requires_grad=True), torch.randn(shape)
    mixed = mixture(hidden)
    (mixed.hidden * cotangent).sum().backward()

    exact = hidden.detach().double().view(-1, width).requires_grad_()
    matrices = [(e.weight.detach().double(), e.bias.detach().double()) for e in experts]
    gate = mixture.gate.weight.detach().double().requires_grad_()
    probabilities = torch.softmax(exact @ gate.T, -1)
    capacity = math.inf if capacity_factor is None else math.ceil(capacity_factor * 2 * 21 / count)
    found, counts, _ = routed((exact @ gate.T).detach(), 2, capacity)
    terms = [torch.zeros(width, dtype=torch.float64) for _ in range(21)]
    chosen = probabilities.topk(2).indices
    for index, (choice, token, _) in enumerate(found):
        expert = int(chosen[token, choice])
        assert sum(counts[:expert]) <= index < sum(counts[: expert + 1])
        weight = probabilities[token, expert] / probabilities[token, chosen[token]].sum()
        terms[token] = terms[token] + weight * (exact[token] @ matrices[expert][0].T + matrices[expert][1])
    wanted = torch.stack(terms).view(shape)
    (wanted * cotangent.double()).sum().backward()
    torch.testing.assert_close(mixed.hidden.double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    assert int(mixed.dropped_tokens) == 2 * 21 - len(found)
    assert hidden.grad is not None and exact.grad is not None and mixture.gate.weight.grad is not None
    torch.testing.assert_close(hidden.grad.double().view(-1, width), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixture.gate.weight.grad.double(), gate.grad, rtol=1e-4, atol=1e-5)


def test_a_mixture_in_half_precision_has_an_exact_gate() -> None:
    mixture = MixtureOfExperts(8, lambda _: nn.Linear(8, 8), 4).bfloat16()
    hidden = torch.randn(5, 8, dtype=torch.bfloat16)
    mixed = mixture(hidden)
    assert (mixed.hidden.dtype, mixed.aux_loss.dtype) == (torch.bfloat16, torch.float32)
    logits = nn.functional.linear(hidden.float(), mixture.gate.weight.float())
    exact = balance_loss(route(logits).first_choices, torch.softmax(logits, -1))
    torch.testing.assert_close(mixed.aux_loss, exact, rtol=1e-6, atol=0)
