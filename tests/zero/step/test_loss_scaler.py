"""The loss scaler against a plain re-implementation that keeps the number of every iteration."""

from __future__ import annotations

import random
import secrets

import pytest

from zero_ext.config import LossScaleConfig
from zero_ext.zero.step.loss_scaler import LossScaler


class Reference:
    """DeepSpeed 0.19's rules, told by iteration numbers: the interval since the last overflow decides."""

    def __init__(self, policy: LossScaleConfig) -> None:
        self.policy = policy
        self.scale = 2.0**policy.initial_power
        self.tolerance = policy.hysteresis
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        policy = self.policy
        if overflow and self.tolerance == 1:
            if self.scale == policy.minimum:
                raise FloatingPointError
            self.scale = max(policy.minimum, self.scale / 2)
            self.last_overflow = self.iteration
        elif overflow:
            self.tolerance -= 1
            self.last_overflow = self.iteration
        else:
            quiet = self.iteration - self.last_overflow - 1
            grows = quiet > 0 and quiet % policy.window == 0
            if grows:
                self.scale *= 2
            if grows or policy.consecutive_hysteresis:
                self.tolerance = policy.hysteresis
        self.iteration += 1


def random_policy(rng: random.Random) -> LossScaleConfig:
    return LossScaleConfig(
        initial_power=rng.randint(3, 12),
        window=rng.randint(1, 5),
        hysteresis=rng.randint(1, 4),
        consecutive_hysteresis=rng.random() < 0.5,
        minimum=rng.choice([1.0, 0.25, 3.0]),
    )


def test_random_sequences_match_the_reference() -> None:
    seed = secrets.randbits(32)
    print("random seed", seed)
    rng = random.Random(seed)
    ended = grown = 0
    for _ in range(200):
        policy = random_policy(rng)
        scaler, reference = LossScaler(policy), Reference(policy)
        often = rng.choice([0.1, 0.4, 0.8])
        for _ in range(80):
            overflow = rng.random() < often
            try:
                reference.update(overflow)
            except FloatingPointError:
                before = scaler.state_dict()
                with pytest.raises(
                    FloatingPointError, match=r"smallest loss scale .* \(loss_scale.minimum\)"
                ):
                    scaler.update(overflow)
                assert scaler.scale == before["scale"]
                ended += 1
                break
            scaler.update(overflow)
            assert scaler.scale == reference.scale
            grown += scaler.scale > 2.0**policy.initial_power
            if rng.random() < 0.2:
                scaler, saved = LossScaler(policy), scaler.state_dict()
                scaler.load_state_dict(saved)
    assert ended > 5 and grown > 5  # both ends were seen


def test_a_static_scale_never_moves() -> None:
    scaler = LossScaler(LossScaleConfig(static=128.0))
    dynamic = LossScaler(LossScaleConfig())
    scaler.load_state_dict(dynamic.state_dict())
    for overflow in (True, True, True, False):
        scaler.update(overflow)
        assert scaler.scale == 128.0


@pytest.mark.parametrize(
    "change", [{"scale": 0.0}, {"scale": float("nan")}, {"hysteresis": 0}, {"clean_steps": -1}]
)
def test_bad_states_change_nothing(change: dict[str, float]) -> None:
    scaler = LossScaler(LossScaleConfig())
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=next(iter(change))):
        scaler.load_state_dict({**before, "scale": 8.0, **change})
    assert scaler.state_dict() == before
