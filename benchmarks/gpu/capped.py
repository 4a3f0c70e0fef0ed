"""The largest model that trains with the device's memory capped, against PyTorch alone.

python -m benchmarks.gpu.capped --cap 10 [--first 13b] [--device cuda] [--seconds 90] [--toy]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.gpt import GPT_13B, GPTShape, gpt_of
from benchmarks.gpu.options import parse
from benchmarks.gpu.placement import choices, deepest_predicted
from benchmarks.gpu.plain_limit import RECIPE, plain_limit
from benchmarks.gpu.result import Bar, Budget, Result
from benchmarks.harness.environment import available_bytes
from benchmarks.harness.ranks import REPOSITORY
from benchmarks.peers.base import nvme_folder

# Times what PyTorch alone trains, by GiB of the cap.
BARS = {10: 10.0, 32: 8.0}
PLAIN_WIDTH, WIDTH = 2560, 5120
BATCH, STEPS = 16, 2
DEPTHS = (40, 50)  # from which predictions go on linearly
TOY_CAP, TOY_PLAIN_WIDTH, TOY_WIDTH = 600_000, 32, 64
SECONDS_OF_A_TRIAL = 20.0
NOTE = (
    "zero_ext: stage 3, bfloat16 parameters, float32 masters, every block checkpointed, updates inside"
    " backward; the first placement that is predicted to fit. TFLOP/s: of the last step, 6 operations a"
    " weight and token and causal attention, what checkpointing repeats not counted. Peak: tensors on the"
    f" device, by torch's allocator, whose total set_per_process_memory_fraction caps. {RECIPE}."
)
PREDICTED = (
    "By the formulas and the planned staging, from two depths each, with one sequence a step, for the memory"
    " and storage that are free here. Not trained but where the table above says so."
)


class Trials:
    """Trials of one cap, each in a process of its own, within the time."""

    def __init__(
        self, device: torch.device, cap: int, host: int, budget: Budget, result: Result, toy: bool
    ) -> None:
        self.device, self.cap, self.host, self.toy = device, cap, host, toy
        self.budget, self.result = budget, result
        # Staging and activations of toy models are as large as their state; nothing holds them to a cap.
        self.cap_bytes = 100 * cap if toy else cap
        columns = ("model", "parameters, 10⁹", "placement", "predicted GiB: device, host, NVMe", "trained")
        figures = ("batch", "peak GiB", "prepare s", "step s", "TFLOP/s")
        self.rows = result.table(f"Under a cap of {cap / 2**30:.3g} GiB", (*columns, *figures), NOTE)

    def plain(self) -> GPTShape | None:
        """The deepest of PyTorch alone."""
        width = TOY_PLAIN_WIDTH if self.toy else PLAIN_WIDTH
        shape, count, peak = plain_limit(lambda depth: self.shape_of(width, depth), self.device, self.cap)
        name, size = (shape.name, f"{shape.parameters / 1e9:.3f}") if shape else ("none", "0")
        words = f"PyTorch alone, deepest of {count} trials"
        self.rows.append([name, size, words, "", "yes", "1", f"{peak / 2**30:.1f}", "", "", ""])
        self.result.data["plain"] = {"parameters": shape.parameters if shape else 0, "peak": peak}
        return shape

    def shape_of(self, width: int, depth: int) -> GPTShape:
        """A GPT, tiny in toy runs."""
        if self.toy:
            return GPTShape(f"toy-{width}x{depth}", width, depth, 2, vocabulary=64, positions=16)
        return gpt_of(width, depth)

    def at_least(self, parameters: float) -> GPTShape:
        """The shallowest GPT of our width with as many parameters."""
        width = TOY_WIDTH if self.toy else WIDTH
        depth = 1
        while self.shape_of(width, depth).parameters < parameters:
            depth += 1
        return self.shape_of(width, depth)

    def run(self, shape: GPTShape, moments: str, most: int) -> dict[str, Any]:
        """Train `shape` under the cap with at most so many sequences; the trial, also in the table."""
        request = {
            "shape": asdict(shape),
            "device": str(self.device),
            "cap": self.cap_bytes,
            "host": self.host,
            "disk": shutil.disk_usage(nvme_folder()).free,
            "batch": most,
            "steps": STEPS,
            "moments": moments,
        }
        trial = self._ask(request)
        self.result.data.setdefault("trials", []).append({"model": shape.name, **trial})
        steps = "" if not trial.get("trained") else f"{trial['step_seconds'][-1]:.2f}"
        self.rows.append(
            [
                shape.name,
                f"{shape.parameters / 1e9:.3f}",
                str(trial.get("placement", "")),
                ", ".join(f"{nbytes / 2**30:.1f}" for nbytes in (trial.get("predicted") or {}).values()),
                "yes" if trial.get("trained") else f"no: {trial['reason']}",
                str(trial.get("batch", "")),
                f"{trial.get('peak', 0) / 2**30:.1f}",
                f"{trial.get('prepare_seconds', 0.0):.1f}",
                steps,
                f"{trial['teraflops']:.1f}" if steps else "",
            ]
        )
        self.result.report()
        return trial

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.gpu.trial", json.dumps(request)]
        left = self.budget.left()
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=max(left, 1.0),
            )
        except subprocess.TimeoutExpired:
            reason = f"no end within the {left:.0f} s that were left"
            return {"trained": False, "timed_out": True, "reason": reason}
        if done.returncode != 0:
            return {"trained": False, "reason": f"the process ended with status {done.returncode}"}
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def judge(
        self, name: str, shape: GPTShape, bar: float, value: float, moments: str = ""
    ) -> dict[str, Any]:
        """Train `shape`; the bar `name` has `value` if it does, else 0, and is left out for want of time."""
        left = self.budget.left()
        if left < (1.0 if self.toy else SECONDS_OF_A_TRIAL):
            self.result.left_out.append(f"{name}: {max(left, 0.0):.0f} s were left for {shape.name}")
            return {}
        trial = self.run(shape, moments, 2 if self.toy else BATCH)
        if "OutOfMemory" in trial.get("reason", "") and trial["batch"] > 1:
            # How much activations take is an estimate; a smaller batch is the same model.
            trial = self.run(shape, moments, trial["batch"] // 2)
        if trial.get("timed_out"):
            self.result.left_out.append(f"{name}: {shape.name}, {trial['reason']}")
        else:
            self.result.bars.append(Bar(name, value if trial.get("trained") else 0.0, bar))
        self.result.report()
        return trial

    def predict(self) -> None:
        """A table of the largest model that each placement is predicted to hold."""
        title = f"Largest model of each placement under {self.cap / 2**30:.3g} GiB, predicted"
        rows = self.result.table(title, ("placement", "parameters, 10⁹"), PREDICTED)
        disk = shutil.disk_usage(nvme_folder()).free
        width = TOY_WIDTH if self.toy else WIDTH
        few, many = (choices(self.shape_of(width, depth), self.cap_bytes) for depth in DEPTHS)
        for first, second in zip(few, many, strict=True):
            depth = deepest_predicted(first, second, DEPTHS, self.cap_bytes, self.host, disk)
            rows.append(
                [first.name, f"{self.shape_of(width, depth).parameters / 1e9:.3f}" if depth else "none"]
            )


def measure(
    device: torch.device, gibibytes: int, first: str, memory: float, seconds: float, toy: bool
) -> Result:
    """A named model, PyTorch alone, ours at the bar's multiple of it. `memory` in GiB, 0 for what is free."""
    result, budget = Result(), Budget(seconds)
    host = int(memory * 2**30) or available_bytes()
    trials = Trials(device, TOY_CAP if toy else gibibytes * 2**30, host, budget, result, toy)
    bar = BARS[gibibytes]
    if first == "13b":
        shape = trials.at_least(2 * TOY_CAP / 16) if toy else GPT_13B
        trial = trials.judge(f"{shape.name} trains under {gibibytes} GiB", shape, 1.0, 1.0, "bf16")
        result.line = f"{shape.name}: {trial.get('teraflops', 0.0):.1f} TFLOP/s"
    plain = trials.plain()
    if plain is None:
        result.failures.append("PyTorch alone trains nothing under the cap")
        return result
    shape = trials.at_least(bar * plain.parameters)
    name = f"largest model / PyTorch alone under {gibibytes} GiB"
    trials.judge(name, shape, bar, shape.parameters / plain.parameters)
    trials.predict()
    return result


if __name__ == "__main__":
    options = parse(__doc__, {"--cap": (int, 10), "--first": (str, ""), "--memory": (float, 0.0)})
    result = measure(
        options.device, options.cap, options.first, options.memory, options.seconds - 10, options.toy
    )
    result.finish()
