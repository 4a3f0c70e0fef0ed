"""The training setup: the inputs of a simulation besides the model and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from zero_ext.config import ZeroConfig, load_config
from zero_ext.config.buffer_sizes import BLOCK_ELEMENTS
from zero_ext.config.full_tensor_costs import DEFAULT_NS_DTYPE, DIRECTION_BYTES
from zero_ext.config.offload import StatePlacement
from zero_ext.config.optimizer_traits import OPTIMIZERS, planned_optimizers
from zero_ext.config.tiers import CAPACITIES, TIERS, Tier, distance_from_device, other_tiers
from zero_ext.plan.state_memory import TrainingState, check_count

Activations = Literal["saved", "recomputed", "recomputed_host"]
ACTIVATIONS: tuple[Activations, ...] = ("saved", "recomputed", "recomputed_host")
UPDATE_MODES = ("after_backward", "in_backward", "delayed")
FIRST_STAGE = {"params": 3, "grads": 2, "optimizer": 1}
PARAMETER_BYTES = 2
_LEAST = dict.fromkeys(("world_size", "micro_batch", "accumulation_steps", "in_flight"), 1) | {
    "bucket_elements": 1,
    "max_live_elements": 1,
    "staging_buffer_bytes": 1,
    "prefetch_elements": 0,
    "reuse_elements": 0,
}
UNIT_SIZES = ("prefetch_elements", "reuse_elements", "bucket_elements", "max_live_elements")
DEFAULT_OPTIMIZER = "AdamW"
# Bytes of an entry of one kind of moments, and how many elements share it.
_MOMENT_FIELDS = {"fp32": ((4, 1),), "bf16": ((2, 1),), "8bit": ((4, BLOCK_ELEMENTS), (1, 1))}


class StateTiers:
    """The tiers of parameters, gradients and optimizer state."""

    params: Tier
    grads: Tier
    optimizer: Tier

    @property
    def tiers(self) -> dict[str, Tier]:
        """Tiers of parameters, gradients and optimizer state."""
        return {"params": self.params, "grads": self.grads, "optimizer": self.optimizer}

    @property
    def distance(self) -> int:
        """Return how far state lies from the device, over all kinds."""
        return distance_from_device(self.tiers.values())


@dataclass(frozen=True)
class Training(StateTiers):
    """One run: 16-bit parameters, fp32 master weights, and the moments of an optimizer.

    Attributes:
        world_size: ranks.
        stage: ZeRO stage, 0 to 3.
        micro_batch: samples of a rank's forward.
        accumulation_steps: micro-batches of a step.
        in_flight: micro-batches with activations that wait for backward simultaneously; several in a
            pipeline.
        params: tier of parameters, as in `offload`.
        grads: tier of gradients, as in `offload`.
        optimizer: tier of the optimizer, as in `offload`.
        update_mode: when updates run, as `offload.update_mode`. Those in backward are final, never rolled
            back.
        activations: kept; recomputed in backward from the outputs of blocks; these outputs in host memory
            meanwhile (ZeRO-Infinity, section 5.1.2).
        clipping: the step waits for the global norm.
        moments_dtype: as in `precision`.
        optimizer_type: name of an optimizer with a fused step: Adafactor, Adam, AdamW, Lamb, Lion or Muon.
        ns_dtype: dtype of Muon's iterations, as its setting.
        prefetch_elements: as in `units`.
        reuse_elements: as in `units`.
        bucket_elements: as in `units`.
        max_live_elements: as in `units`.
        staging_buffer_bytes: as in `offload`.

    Raises:
        ValueError: a value is out of range, or a tier does not fit the stage.
    """

    world_size: int
    stage: int = 3
    micro_batch: int = 1
    accumulation_steps: int = 1
    in_flight: int = 1
    params: Tier = "device"
    grads: Tier = "device"
    optimizer: Tier = "device"
    update_mode: Literal["after_backward", "in_backward", "delayed"] = "after_backward"
    activations: Activations = "recomputed"
    clipping: bool = True
    moments_dtype: str = "fp32"
    optimizer_type: str = DEFAULT_OPTIMIZER
    ns_dtype: str = DEFAULT_NS_DTYPE
    prefetch_elements: int = 8_388_608
    reuse_elements: int = 0
    bucket_elements: int = 16_777_216
    max_live_elements: int = 1_000_000_000
    staging_buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_count(name, getattr(self, name), least)
        StatePlacement.of_stage(self.stage)
        TrainingState({}, moments_dtype=self.moments_dtype)
        choices: dict[str, tuple[str, ...]] = {
            "update_mode": UPDATE_MODES,
            "activations": ACTIVATIONS,
            "ns_dtype": tuple(DIRECTION_BYTES),
        }
        for name, known in (choices | dict.fromkeys(FIRST_STAGE, CAPACITIES)).items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}. Choose one "
                    "of them."
                )
        self._check_optimizer()
        for kind, first in FIRST_STAGE.items():
            tier = getattr(self, kind)
            if tier != "device" and self.stage < first:
                raise ValueError(
                    f"{kind}: expected 'device' in stage {self.stage}, where they are not sharded, got "
                    f"{tier!r}. Set stage to at least {first}, or {kind} to 'device'."
                )
        if self.update_mode == "delayed" and self.optimizer == "device":
            raise ValueError(
                f"update_mode: expected the optimizer on {other_tiers()} for 'delayed', got 'device'. Set "
                f"optimizer to {other_tiers()}, or choose another update_mode."
            )

    def _check_optimizer(self) -> None:
        known = planned_optimizers()
        if self.optimizer_type not in known:
            raise ValueError(
                f"optimizer_type: expected one of {', '.join(known)}, got {self.optimizer_type!r}. Choose "
                "one of them."
            )
        traits = known[self.optimizer_type]
        if self.moments_dtype == "8bit" and not traits.eight_bit:
            raise ValueError(
                f"moments_dtype: expected fp32 or bf16 with {traits.name}, got '8bit'. Choose one of them."
            )

    @classmethod
    def of_config(
        cls,
        source: ZeroConfig | Mapping[str, Any] | str | None,
        world_size: int,
        activations: Activations = "saved",
    ) -> Training:
        """Return the run that a configuration describes.

        An optimizer that is no value of `optimizer_type`, and none, counts as AdamW.

        Args:
            source: as for [`load_config`][zero_ext.load_config].
            world_size: ranks.
            activations: as the attribute.

        Returns:
            The run.

        Raises:
            ValueError: the configuration does not fit.
        """
        config = source if isinstance(source, ZeroConfig) else load_config(source)
        batch, offload = config.batch.resolve(world_size), config.offload
        tiers: dict[str, Any] = {kind: TIERS[getattr(offload, kind)].capacity for kind in FIRST_STAGE}
        named = config.optimizer.type if config.optimizer is not None else DEFAULT_OPTIMIZER
        params = config.optimizer.params if config.optimizer is not None else {}
        return cls(
            world_size=world_size,
            stage=config.stage,
            micro_batch=batch.micro_batch_size or 1,
            accumulation_steps=batch.gradient_accumulation_steps,
            **tiers,
            update_mode=offload.update_mode,
            activations=activations,
            clipping=bool(config.gradient_clipping),
            moments_dtype=config.precision.moments_dtype,
            optimizer_type=named if named in planned_optimizers() else DEFAULT_OPTIMIZER,
            ns_dtype=params.get("ns_dtype", DEFAULT_NS_DTYPE),
            staging_buffer_bytes=offload.staging_buffer_bytes,
            **{name: getattr(config.units, name) for name in UNIT_SIZES},
        )

    @property
    def placement(self) -> StatePlacement:
        """Shard and tiers of each state kind."""
        found = replace(
            StatePlacement.of_stage(self.stage),
            params_tier=self.params,
            grads_tier=self.grads,
            optimizer_tier=self.optimizer,
        )
        return found.on_ranks(self.world_size)

    def among(self, spread: int) -> Training:
        """Return the run as the ranks with the same experts share these.

        Args:
            spread: ranks that each have other experts.

        Returns:
            The same on a `spread`-th of the ranks.

        Raises:
            ValueError: `spread` does not divide the ranks.
        """
        if self.world_size % spread:
            raise ValueError(
                f"ep: expected a divisor of the {self.world_size} data-parallel ranks, got {spread}. "
                "Choose a divisor."
            )
        return self if spread == 1 else replace(self, world_size=self.world_size // spread)

    @property
    def samples(self) -> int:
        """Samples that all ranks see in a step."""
        return self.world_size * self.micro_batch * self.accumulation_steps

    @property
    def uses_up_gradients(self) -> bool:
        """Return whether each unit's gradient ends with its update in backward."""
        return self.update_mode == "in_backward" and not self.clipping and self.accumulation_steps == 1

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of gradients: those of several micro-batches add up in fp32."""
        return 4 if self.accumulation_steps > 1 else PARAMETER_BYTES

    @property
    def needs_full_tensors(self) -> bool:
        """Return whether a step needs full matrices, each at one rank."""
        return OPTIMIZERS[self.optimizer_type].whole_tensors

    @property
    def direction_bytes(self) -> int:
        """Bytes of an element on its way to the owner of its matrix and back."""
        return DIRECTION_BYTES[self.ns_dtype]

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the optimizers that step some of the parameters, that of hidden matrices first."""
        rest = OPTIMIZERS[self.optimizer_type].rest
        return (self.optimizer_type, rest) if rest else (self.optimizer_type,)

    def rule_of(self, hidden_matrix: bool) -> str:
        """Return the optimizer of a parameter.

        Args:
            hidden_matrix: it is a matrix and neither an embedding nor an output layer, as `zero_ext.Muon`
                with `module` decides.

        Returns:
            Its name.
        """
        return self.rules[0] if hidden_matrix else self.rules[-1]

    def state_fields(self, *rules: str) -> tuple[tuple[int, int], ...]:
        """Return master weights and each kind of moments: bytes of an entry, and how many elements share it.

        Args:
            rules: names of optimizers with kinds that are listed; all by default.

        Returns:
            A pair for each kind.
        """
        kinds = dict.fromkeys(
            kind for rule in rules or self.rules for kind in OPTIMIZERS[rule].planned_moments
        )
        return (4, 1), *(len(kinds) * _MOMENT_FIELDS[self.moments_dtype])

    def state_bytes(self, rule: str) -> float:
        """Return bytes of an element's master weight and moments.

        Args:
            rule: name of its optimizer.

        Returns:
            The number, which has a fraction for moments in 8 bits.
        """
        return sum(nbytes / elements for nbytes, elements in self.state_fields(rule))

    def owned(self, elements: int, sharded: bool) -> int:
        """Return the elements of a rank.

        Args:
            elements: of the model.
            sharded: whether ranks have a shard each, or all of them.

        Returns:
            The number.
        """
        return -(-elements // self.world_size) if sharded else elements
