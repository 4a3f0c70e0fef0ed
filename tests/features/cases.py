"""Features of the README's table, and for each what the tests run of it on the strict stand-in."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

SHARDING = "tests.features.sharding"
PARALLEL = "tests.features.parallel"
ACTIVATIONS = "tests.features.activations"
TRAINER = "tests.features.trainer"

SEQUENCES = "sequence parallelism (cp, DeepSpeed-Ulysses and ring attention)"
ATTENTION = "block-sparse attention, and attention within packed documents"


class Case(NamedTuple):
    """One test: ``body`` on ``ranks`` ranks with ``arguments``."""

    feature: str
    name: str
    body: str
    ranks: int
    arguments: dict[str, Any]
    needs_transformers: bool = False


PLANS: dict[str, dict[str, Any]] = {
    "fp32, clipped": {"clip": 0.1},
    "bf16, accumulated, clipped": {"micro_batches": 2, "clip": 0.1, "dtype": "bf16"},
    "fp32, accumulated undeclared": {"micro_batches": 3, "accumulation": "undeclared"},
    "fp32, no_sync": {"micro_batches": 2, "accumulation": "no_sync"},
    "bf16, no_sync": {"micro_batches": 2, "accumulation": "no_sync", "dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
}
TIERS = ("device", "host", "nvme")
KINDS = ("optimizer", "grads", "params")


def stages_by_tiers_by_plans() -> list[Case]:
    """Pairwise: every stage with every tier of every kind of state, with every plan in turn."""
    found = []
    plans = itertools.cycle(PLANS.items())
    for stage in range(4):
        kinds = KINDS[:stage]
        rows = [dict(zip(kinds, ("device",) * len(kinds), strict=True))] if not kinds else []
        for shift, tier in itertools.product(range(3 if stage > 1 else 1), range(3)):
            rows.append({kind: TIERS[(tier + shift * index) % 3] for index, kind in enumerate(kinds)})
        for offload in [row for number, row in enumerate(rows) if row not in rows[:number]]:
            name, plan = next(plans)
            tiers = ", ".join(f"{kind} {tier}" for kind, tier in offload.items()) or "device"
            found.append(
                Case(
                    "ZeRO stages 0 to 3, with state on the device, in host memory or on NVMe",
                    f"stage {stage}, {tiers}, {name}",
                    f"{SHARDING}:zero",
                    2,
                    {"stage": stage, "plan": plan, "offload": offload},
                )
            )
    return found


def sharding_cases() -> list[Case]:
    found = []
    for tiers in ({}, {"optimizer": "host", "params": "host"}, {"optimizer": "nvme", "params": "nvme"}):
        name = ", ".join(f"{kind} {tier}" for kind, tier in tiers.items()) or "device"
        for feature, loads in (
            ("sharded initialization (`zero_ext.Init`)", False),
            ("loading weights into a model on the meta device", True),
        ):
            found.append(
                Case(
                    feature,
                    f"{feature}, {name}",
                    f"{SHARDING}:sharded_init",
                    2,
                    {"offload": tiers, "loads": loads},
                )
            )
    for step, plan in itertools.product(
        ("in_backward", "delayed"), ("fp32, clipped", "bf16, accumulated, clipped")
    ):
        for tier in ("host", "nvme"):
            if step == "in_backward" and PLANS[plan].get("clip"):
                settings = {key: value for key, value in PLANS[plan].items() if key != "clip"}
            else:
                settings = PLANS[plan]
            offload = {"optimizer": tier, "grads": "host", "update_mode": step}
            arguments = {"stage": 3, "plan": settings, "offload": offload}
            found.append(
                Case(
                    "optimizer updates during backward, or delayed by one step",
                    f"{step}, {tier}, {plan}",
                    f"{SHARDING}:zero",
                    2,
                    arguments,
                )
            )
    return found


CASES: list[Case] = [*stages_by_tiers_by_plans(), *sharding_cases()]
CASES += [
    Case(
        "optimizer updates during backward, or delayed by one step",
        "part of the optimizer on the device",
        f"{SHARDING}:zero",
        2,
        {"stage": 2, "plan": PLANS["fp32, clipped"], "offload": {"optimizer": "host", "ratio": 0.5}},
    ),
    *(
        Case(
            "fused Adam, AdamW, Lamb and Lion; Muon and Adafactor on shards",
            f"{name}, {moments} moments",
            f"{SHARDING}:zero",
            2,
            {
                "stage": 3,
                "plan": PLANS["bf16, no_sync"],
                "offload": offload,
                "optimizer": name,
                "precision": {"dtype": "bf16", **({"moments_dtype": moments} if moments != "fp32" else {})},
            },
        )
        for name, moments, offload in (
            ("adamw", "8bit", {}),
            ("lion", "bf16", {"optimizer": "host"}),
            ("lamb", "fp32", {}),
            ("muon", "fp32", {}),
            ("muon", "bf16", {"optimizer": "host"}),
            ("sgd", "fp32", {"optimizer": "nvme"}),
        )
    ),
    *(
        Case(
            "fused Adam, AdamW, Lamb and Lion; Muon and Adafactor on shards",
            f"adafactor, {next(iter(offload.values()), 'device')}",
            f"{SHARDING}:zero",
            2,
            {"stage": 2, "plan": PLANS["bf16, no_sync"], "offload": offload, "optimizer": "adafactor"},
        )
        for offload in ({}, {"optimizer": "host"}, {"optimizer": "nvme"})
    ),
    *(
        Case(
            "ZeRO stages 0 to 3, with state on the device, in host memory or on NVMe",
            f"routed experts, {how}state {tier}",
            f"{SHARDING}:routed_experts",
            2,
            {
                "offload": dict.fromkeys(KINDS, tier),
                "checkpoints": how == "checkpointed, ",
                "updates": "routed" if how == "stepped alone, " else "all",
            },
        )
        for tier, how in (
            ("device", ""),
            ("device", "checkpointed, "),
            ("device", "stepped alone, "),
            ("host", ""),
            ("nvme", ""),
            ("nvme", "stepped alone, "),
        )
    ),
    *(
        Case(
            "checkpoints for any number of ranks",
            f"checkpoint of stage {stages[0]} into {stages[1]}, {name}",
            f"{SHARDING}:checkpoints",
            2,
            {"stages": stages, "offload": dict.fromkeys(KINDS, name)},
        )
        for stages, name in (([3, 3], "device"), ([0, 3], "host"), ([3, 1], "nvme"))
    ),
    *(
        Case(
            "1-bit Adam, 0/1 Adam, 1-bit LAMB", name, f"{SHARDING}:compressed_optimizer", 2, {"course": name}
        )
        for name in (
            "1-bit Adam, bf16, accumulated",
            "1-bit Adam, moments sharded",
            "1-bit LAMB",
            "0/1 Adam",
            "0/1 Adam, moments sharded",
        )
    ),
    *(
        Case(
            "ZeRO++ and MiCS",
            name,
            f"{SHARDING}:zero",
            4,
            {"stage": 3, "plan": plan, "offload": {}, "communication": {"ranks_per_node": 2, **keys}, **more},
        )
        for name, plan, keys, more in (
            # Without quantized gradients the ranks' sum is the CPU's where it goes in rank order.
            (
                "int8 weights",
                PLANS["fp32, no_sync"],
                {"quantized_weights": "int8"},
                {"precision": {"reduction": "rank_order"}},
            ),
            ("int4 gradients", PLANS["bf16, accumulated, clipped"], {"quantized_gradients": "int4"}, {}),
            ("secondary shards", PLANS["bf16, no_sync"], {"hierarchical_partition": True}, {}),
            (
                "all of ZeRO++",
                PLANS["fp32, clipped"],
                {"quantized_weights": "int8", "quantized_gradients": "int8", "hierarchical_partition": True},
                {},
            ),
            ("sharding groups", PLANS["fp32, clipped"], {"shard_group_size": 2}, {}),
        )
    ),
    Case(
        "gradient accumulation, clipping, editing of parameters",
        "gathered, no_sync, clip_grad_norm_",
        f"{SHARDING}:editing",
        2,
        {},
    ),
    *(
        Case("inference", f"parameters on {tier}", f"{SHARDING}:inference", 2, {"offload": {"params": tier}})
        for tier in TIERS
    ),
]


def parallel_cases() -> list[Case]:
    clipped = {"gradient_clipping": 0.5, "timeout_seconds": 120.0}
    feature = "pipeline parallelism (pp), with tied parameters"
    found = [
        Case(
            feature,
            f"pp {pp} x tp {tp}, stage {stage}, {precision}",
            f"{PARALLEL}:pipeline",
            4,
            {
                "lengths": {"pp": pp, "tp": tp},
                "config": {"stage": stage, "precision": {"dtype": precision}, **clipped},
            },
        )
        for pp, tp, stage, precision in ((2, 1, 2, "fp32"), (2, 1, 3, "bf16"), (2, 2, 1, "fp32"))
    ]
    found.append(
        Case(
            feature,
            "layer-major",
            f"{PARALLEL}:pipeline",
            4,
            {"lengths": {"pp": 1}, "config": {"stage": 1, **clipped}, "schedule": "layer_major"},
        )
    )
    found += [
        Case(
            "tensor parallelism (tp)",
            f"tp 2 x dp 2, stage {stage}{', parts of sequences' if sequence else ''}",
            f"{PARALLEL}:tensors",
            4,
            {"config": {"stage": stage, **clipped}, "sequence": sequence},
        )
        for stage, sequence in ((1, False), (3, False), (2, True))
    ]
    found += [
        Case(
            "expert parallelism (ep)",
            f"ep 2 x dp 2, stage {stage}",
            f"{PARALLEL}:experts",
            4,
            {"config": {"stage": stage, **clipped}},
        )
        for stage in (0, 1, 3)
    ]
    found += [
        Case(
            SEQUENCES,
            f"{' x '.join(f'{axis} {length}' for axis, length in lengths.items())}, stage {stage}",
            f"{PARALLEL}:sequences",
            4,
            {"lengths": lengths, "config": {"stage": stage, **clipped}},
        )
        for lengths, stage in (({"cp": 2}, 3), ({"pp": 2, "cp": 2}, 1))
    ]
    found += [
        Case(
            SEQUENCES,
            f"cp {cp}, ring {ring}, packed documents, stage {stage}",
            f"{PARALLEL}:rings",
            4,
            {"cp": cp, "ring": ring, "config": {"stage": stage, **clipped}},
        )
        for cp, ring, stage in ((4, 4, 3), (4, 2, 1), (2, 2, 2))
    ]
    return found


CASES += parallel_cases()
CASES += [
    *(
        Case(ATTENTION, name, f"{ACTIVATIONS}:sparse", 2, {"layout": layout})
        for name, layout in (
            ("fixed, causal", {"mode": "fixed", "attention": "unidirectional", "num_local_blocks": 2}),
            ("BigBird", {"mode": "bigbird", "num_random_blocks": 1, "num_sliding_window_blocks": 3}),
        )
    ),
    Case(ATTENTION, "packed documents", f"{ACTIVATIONS}:documents", 2, {}),
    *(
        Case(
            "activation checkpointing and offload",
            name,
            f"{ACTIVATIONS}:checkpointed",
            2,
            {"section": section},
        )
        for name, section in (
            ("on the device", {}),
            ("in host memory", {"tier": "host", "min_offload_bytes": 0}),
            ("on NVMe", {"tier": "nvme", "min_offload_bytes": 0}),
            (
                "saved tensors in host memory",
                {"mode": "offload_saved_tensors", "tier": "host", "min_offload_bytes": 0},
            ),
            ("divided among the ranks", {"partition_activations": True}),
            ("divided, in host memory", {"partition_activations": True, "tier": "host"}),
        )
    ),
    *(
        Case(
            "transformers' Trainer, with and without LoRA",
            f"{'LoRA' if adapters else 'all weights'}, stage {stage}",
            f"{TRAINER}:trainer",
            2,
            {"adapters": adapters, "config": {"stage": stage}},
            needs_transformers=True,
        )
        for adapters, stage in ((False, 2), (False, 3), (True, 3))
    ),
    *(
        Case(
            "expert parallelism (ep)",
            f"files of Hugging Face, ep 2 x dp 2, stage {stage}",
            f"{TRAINER}:spread_loading",
            4,
            {"config": {"stage": stage}},
            needs_transformers=True,
        )
        for stage in (2, 3)
    ),
]
