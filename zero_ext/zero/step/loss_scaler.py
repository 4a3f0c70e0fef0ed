"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), with DeepSpeed's hysteresis."""

from __future__ import annotations

import math
from collections.abc import Callable

from zero_ext.config import LossScaleConfig


class LossScaler:
    """The factor on the loss, and how it moves after each step.

    Static if ``policy.static`` is not zero. Dynamic otherwise: it starts at ``2 ** initial_power``; an
    overflow first uses up ``hysteresis`` and then halves the scale, down to ``minimum`` (a further overflow
    there raises ``FloatingPointError``); every ``window`` steps after one without overflow double it and
    refill the hysteresis, every step without overflow refills it if ``consecutive_hysteresis``.
    """

    def __init__(self, policy: LossScaleConfig) -> None:
        self._policy = policy
        self.scale = policy.static or 2.0**policy.initial_power
        self._hysteresis = policy.hysteresis
        self._clean_steps = 0

    def update(self, overflow: bool, explain: Callable[[], str] | None = None) -> None:
        """Move the scale after a step, in which gradients did ``overflow`` or not. ``FloatingPointError``
        for one at the smallest scale, with the text that ``explain`` returns."""
        policy = self._policy
        if policy.static:
            return
        if not overflow:
            self._clean_steps += 1
            if policy.consecutive_hysteresis:
                self._hysteresis = policy.hysteresis
            # By DeepSpeed's rule the first step without overflow does not count.
            interval = self._clean_steps - 1
            if interval > 0 and interval % policy.window == 0:
                self._hysteresis = policy.hysteresis
                self.scale *= 2.0
            return
        self._clean_steps = 0
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self.scale <= policy.minimum:
            which = f" {explain()}" if explain is not None else ""
            raise FloatingPointError(
                f"gradients in fp16: expected finite ones at the smallest loss scale {self.scale:g} "
                f"(loss_scale.minimum), got an overflow.{which} The loss or the model diverges. Use "
                "bf16, or lower the learning rate."
            )
        self.scale = max(self.scale / 2.0, policy.minimum)

    def state_dict(self) -> dict[str, float]:
        """Return the scaler's state, JSON-able."""
        return {"scale": self.scale, "hysteresis": self._hysteresis, "clean_steps": self._clean_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore :meth:`state_dict`; a static scale stays as configured. ``ValueError`` for values that no
        scaler can have, and then nothing changes."""
        scale, hysteresis, clean = float(state["scale"]), int(state["hysteresis"]), int(state["clean_steps"])
        for name, value, valid in (
            ("scale", scale, 0 < scale < math.inf),
            ("hysteresis", hysteresis, hysteresis >= 1),
            ("clean_steps", clean, clean >= 0),
        ):
            if not valid:
                raise ValueError(
                    f"loss scaler state: expected a {name} that a scaler has, got {value!r}. Load another "
                    "checkpoint."
                )
        if not self._policy.static:
            self.scale = scale
        self._hysteresis, self._clean_steps = hysteresis, clean
