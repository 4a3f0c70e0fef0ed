"""zero_ext's ledger against the formula, the live tensors and the resident bytes, for every stage."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness.formula import STATE_KINDS, relative_excess, state_bytes
from benchmarks.harness.ranks import Team, TeamFailure
from benchmarks.harness.report import Table, megabytes
from benchmarks.harness.shapes import Shape, build_model
from benchmarks.peers.base import adamw
from benchmarks.peers.zero_ext_engine import configuration
from zero_ext.plan import TrainingState, model_staging, model_state_bytes

STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2, 4)
FORMULA_TOLERANCE = 0.03
RESIDENT_TOLERANCE = 0.05
RESIDENT_ALLOWANCE = 16 * 2**20
# Stage and ranks with a bar for live tensors against the planner's formulas, and how far they may be off.
PLANNED_BARS = ((2, 4),)
PLANNED_TOLERANCE = 0.05


@dataclass(frozen=True)
class Account:
    """Bytes of one rank (the one that strays furthest): by ledger, formula, live tensors and resident."""

    model: str
    stage: int
    ranks: int
    breakdown: dict[str, int]
    formula: dict[str, float]
    live_tensors: int
    resident_growth: int
    planned_state: int
    planned_staging: int

    @property
    def state(self) -> int:
        """Ledger bytes of the state kinds of the formula."""
        return sum(self.breakdown[kind] for kind in STATE_KINDS)

    @property
    def total(self) -> int:
        """All bytes of the ledger, gather pool and scratch included."""
        return sum(self.breakdown.values())

    @property
    def excess(self) -> float:
        """Worst relative deviation from the formula: of the sum and of every state kind."""
        each = [relative_excess(self.breakdown[kind], self.formula[kind]) for kind in STATE_KINDS]
        return max([*each, relative_excess(self.state, sum(self.formula.values()))], key=abs)

    def bars(self) -> dict[str, bool]:
        """Which bars this account meets."""
        allowed = RESIDENT_TOLERANCE * self.total + RESIDENT_ALLOWANCE
        return {
            "formula": abs(self.excess) <= FORMULA_TOLERANCE,
            "live tensors": abs(self.live_tensors - self.total) <= allowed,
            "resident": abs(self.resident_growth - self.total) <= allowed,
            **({"planner": self.planned} if (self.stage, self.ranks) in PLANNED_BARS else {}),
        }

    @property
    def planned(self) -> bool:
        """Whether live tensors are the planned model state within 5%, with up to the planned staging more or
        less."""
        allowed = PLANNED_TOLERANCE * self.planned_state + self.planned_staging
        return abs(self.live_tensors - self.planned_state) <= allowed


def planned_bytes(shape: Shape, stage: int, ranks: int) -> tuple[int, int]:
    """Model state and staging of a rank by the formulas of `zero_ext.plan`, before anything runs."""
    with torch.device("meta"):
        model = build_model(shape)
    config = configuration(stage, 0, False, "fp32", {})
    staging = model_staging(model, adamw(list(model.parameters())), config, ranks)
    state = model_state_bytes(stage, ranks, TrainingState(trainable={"bf16": shape.parameters}))
    return state.total, staging.total


def account_of(shape: Shape, stage: int, ranks: int, steps: int) -> Account:
    """Train a few steps in fresh processes and take the account of the rank furthest from the formula."""
    with Team(f"zero_ext stage {stage}, {ranks} ranks", ranks, 1) as team:
        options = {"stage": stage}
        started = team.ask("start", family="zero_ext", options=options, shape=shape.name, threads=1)
        team.ask("steps", unmeasured=steps, measured=0)
        answers = team.ask("account")
    planned = planned_bytes(shape, stage, ranks)
    accounts = [
        Account(
            shape.name,
            stage,
            ranks,
            answer["breakdown"],
            state_bytes(shape.parameters, stage, ranks),
            answer["live_tensors"],
            answer["resident"] - begin["before"],
            *planned,
        )
        for begin, answer in zip(started, answers, strict=True)
    ]
    return max(accounts, key=lambda account: (not all(account.bars().values()), abs(account.excess)))


def measure_account(
    shape: Shape, steps: int, progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Accounts of stages 0 to 3 on 1, 2 and 4 ranks as dictionaries, and the failures."""
    accounts, failures = [], []
    for ranks in WORLD_SIZES:
        for stage in STAGES:
            progress(f"{shape.name}: bytes of stage {stage} on {ranks} ranks")
            try:
                account = account_of(shape, stage, ranks, steps)
            except TeamFailure as failure:
                failures.append(f"{shape.name}, stage {stage}, {ranks} ranks: {failure}")
                continue
            figures = {"state": account.state, "total": account.total, "excess": account.excess}
            accounts.append({**asdict(account), **figures, "bars": account.bars()})
    return accounts, failures


def account_bars(accounts: list[dict[str, Any]]) -> dict[str, bool]:
    """Every bar once: met only if all accounts meet it."""
    names = dict.fromkeys(name for account in accounts for name in account["bars"])
    return {name: all(account["bars"].get(name, True) for account in accounts) for name in names}


def account_table(accounts: list[dict[str, Any]]) -> Table:
    """Measured bytes beside the formula, MB a rank."""
    table = Table(
        "Bytes of model state a rank, MB (10⁶)",
        (
            "stage",
            "ranks",
            *STATE_KINDS,
            "sum",
            "formula",
            "off by",
            "other",
            "live tensors",
            "RSS growth",
            "all bars met",
        ),
        note="Persistence threshold 0, after a step. Off by: the worst of the three kinds and the sum (bar"
        " 3%). Other: gather pool and scratch. Live tensors: storages the garbage collector finds; RSS"
        " growth: since before the model existed, free heap pages returned (bar for both: within 5% + 16 MiB"
        " of sum + other).",
    )
    for account in accounts:
        missed = [name for name, met in account["bars"].items() if not met]
        table.rows.append(
            [
                f"{account['model']} stage {account['stage']}",
                str(account["ranks"]),
                *(megabytes(account["breakdown"][kind]) for kind in STATE_KINDS),
                megabytes(account["state"]),
                megabytes(sum(account["formula"].values())),
                f"{account['excess']:+.2%}",
                megabytes(account["total"] - account["state"]),
                megabytes(account["live_tensors"]),
                megabytes(account["resident_growth"]),
                "yes" if not missed else "no: " + ", ".join(missed),
            ]
        )
    return table


def planned_table(accounts: list[dict[str, Any]]) -> Table:
    """Live tensors against the planner's formulas, MB per rank."""
    table = Table(
        "Live tensors of a rank against the planner's formulas, MB (10⁶)",
        ("stage", "ranks", "live tensors", "model state", "staging", "beyond model state", "bar", "met"),
        note="Model state by `model_state_bytes`, staging by `model_staging`, both before anything runs. Bar:"
        " live tensors within 5% of the model state, plus or minus the staging.",
    )
    for account in accounts:
        state, staging = account["planned_state"], account["planned_staging"]
        met = account["bars"].get("planner")
        table.rows.append(
            [
                f"{account['model']} stage {account['stage']}",
                str(account["ranks"]),
                *(megabytes(each) for each in (account["live_tensors"], state, staging)),
                megabytes(account["live_tensors"] - state),
                "" if met is None else f"± {megabytes(PLANNED_TOLERANCE * state + staging)}",
                "" if met is None else ("yes" if met else "no"),
            ]
        )
    return table
