"""The command ``zero-ext``: its commands with their examples. Arguments go in and text comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from zero_ext.cli.checkpoint_commands import export, import_deepspeed, inspect
from zero_ext.cli.console import EXIT_STATUSES
from zero_ext.cli.machine_commands import bench_nvme, build, env
from zero_ext.cli.options import examples, unwrapped
from zero_ext.cli.plan_command import plan
from zero_ext.cli.plot_attention import attention
from zero_ext.cli.simulate_command import simulate_step
from zero_ext.cli.tune_command import tune

__all__ = ["app"]

_PLANNING, _TRAINING = "Before training", "Training"
_CHECKPOINTS, _MACHINE = "Checkpoints", "This machine"


_STATUSES = [
    "[bold]Exit status of every command[/]",
    *(f"{status}  {text}" for status, text in EXIT_STATUSES.items()),
]

app = typer.Typer(
    help="Plan, start and inspect training with ZeRO sharding and offload.",
    epilog=f"{examples('plan llama-7b --gpus 8', 'env')}\n\n" + "\n".join(_STATUSES),
    no_args_is_help=True,
    add_completion=False,
)


class _RawArguments(TyperCommand):
    """Leaves all arguments in ``context.args``, ``--`` included, as they were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = list(args)
        super().parse_args(ctx, [])
        ctx.args = arguments
        return arguments


def start_ranks(context: typer.Context) -> None:
    """How do I start my script on several ranks?

    Takes torchrun's arguments, and --deepspeed-compat for scripts that import deepspeed.
    """
    from zero_ext.cli.run import launch

    launch(context.args)


def _add(command: Callable[..., None], name: str, panel: str, *calls: str, **settings: Any) -> None:
    """Register ``command`` as ``name`` with ``calls`` as the examples of its help."""
    text, epilog = unwrapped(command.__doc__), examples(*calls) if calls else None
    app.command(name, help=text, rich_help_panel=panel, epilog=epilog, **settings)(command)


_add(
    plan,
    "plan",
    _PLANNING,
    "plan llama-7b --gpus 8 --gpu-memory 80GB",
    "plan 175b --machine dgx2-v100 --gpus 16 --write config.json",
)
_add(
    simulate_step,
    "simulate",
    _PLANNING,
    "simulate gpt-175b --machine dgx-a100 --gpus 256 --micro-batch 8",
    "simulate llama-7b --gpus 8 --config config.json",
)
_add(
    tune,
    "tune",
    _PLANNING,
    "tune --stages 2,3 --micro-batches 1,2 --write tuned.json train.py --lr 0.1",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
_add(start_ranks, "run", _TRAINING, cls=_RawArguments)
app.add_typer(attention, name="attention", rich_help_panel=_TRAINING)
_add(
    inspect,
    "inspect",
    _CHECKPOINTS,
    "inspect checkpoints",
    "inspect checkpoints --step 2 --no-tensors --json",
)
_add(export, "export", _CHECKPOINTS, "export checkpoints exported --dtype bfloat16")
_add(import_deepspeed, "import-deepspeed", _CHECKPOINTS, "import-deepspeed deepspeed_run imported")
_add(env, "env", _MACHINE, "env", "env --measure machine.json --nvme-path .")
_add(build, "build", _MACHINE, "build", "build --cuda-architectures 8.0,9.0")
_add(
    bench_nvme,
    "bench-nvme",
    _MACHINE,
    "bench-nvme . --size 64MiB --repeats 1",
    "bench-nvme . --size 64MiB --backends threads --write aio.json",
)
