"""What the getters of an engine and of modules return, as JSON, under DeepSpeed itself and under zero_ext."""

from __future__ import annotations

import json
import os
import sys
import types
from operator import attrgetter
from typing import Any

import deepspeed
import torch
from torch import distributed as dist
from torch import nn


def plain(value: Any) -> Any:
    """A value as JSON keeps it, sections of a configuration as their fields."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def answer(owner: Any, path: str) -> Any:
    """What an attribute is or a function returns, or its error."""
    try:
        found = attrgetter(path)(owner)
        return plain(found() if isinstance(found, (types.MethodType, types.FunctionType)) else found)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def trained(config: dict[str, Any]) -> nn.Module:
    """An engine after one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    sgd = None if "optimizer" in config else torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    arguments = {"model": model, "model_parameters": model.parameters(), "optimizer": sgd}
    engine = deepspeed.initialize(config=config, **arguments)[0]
    dtype = next(iter(engine.module.parameters())).dtype
    for _ in range(config.get("gradient_accumulation_steps", 1)):
        engine.backward(engine(torch.ones(2, 4, dtype=dtype)).float().sum())
        engine.step()
    return engine


def facts(configs: dict[str, dict[str, Any]], members: list[str], functions: list[str]) -> dict[str, Any]:
    """Answers of the engine of each configuration, and of functions of DeepSpeed's modules."""
    os.environ["LOCAL_RANK"] = "0"
    deepspeed.ops.__compatible_ops__ = {}  # so that DeepSpeed itself compiles nothing
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # which it denies on CPUs
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed()
    found = {}
    for title, config in configs.items():
        engine = trained(config)
        found[title] = {name: answer(engine, name) for name in members}
    return {**found, "functions": {path: answer(deepspeed, path) for path in functions}}


if __name__ == "__main__":
    print("\n" + json.dumps(facts(**json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # A thread that DeepSpeed leaves running may abort the process as the interpreter ends.
