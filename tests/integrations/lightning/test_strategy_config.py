"""What the Trainer and the configuration both say, precisions, and modules that cannot be served."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

import zero_ext
from tests.config.written import FORMS, check
from tests.integrations.lightning.modules import Language, enter, largest_difference, loader, trainer
from tests.multi.on_ranks import on_ranks
from tests.multi.rank import World
from tests.zero.training import distance
from zero_ext import ConfigError
from zero_ext.integrations.lightning import ZeroStrategy
from zero_ext.zero import engine_of


class ByHand(Language):
    """Manual optimization: two micro-batches of one batch, the sum of their gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.automatic_optimization = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.model is not None
        found: torch.Tensor = self.model(ids)
        return found

    def loss_of(self, batch: list[torch.Tensor]) -> torch.Tensor:
        logits = self(batch[0])
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class OwnClipping(Language):
    """Clips every second step only."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val, "norm")


class TwoOptimizers(Language):
    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        raise AssertionError("never reached")


class Watching(ZeroStrategy):
    """Notes whether the module was sharded already when the Trainer handed it over."""

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        with torch._C.DisableTorchFunctionSubclass():
            held = sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())
        self.initialized_sharded = held < sum(parameter.nbytes for parameter in module.parameters()) / 10
        super().setup(trainer)


class Unstorable(Language):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.rate_name] = object() if self.rate_name != "state_dict" else {"lost": torch.ones(1)}


def against_ddp(world: World, kind: type[Language], **arguments: Any) -> None:
    enter(world)
    plain, module = kind(world.seed), kind(world.seed)
    trainer(world, DDPStrategy(), max_epochs=2, **arguments).fit(plain, loader(world.seed))
    trainer(world, ZeroStrategy(), max_epochs=2, **arguments).fit(module, loader(world.seed))
    assert largest_difference(module.losses, plain.losses) < 1e-5
    assert distance(zero_ext.full_state_dict(module), plain.state_dict()) < 1e-4


@on_ranks(2)
def test_manual_optimization_and_clipping_of_the_modules_own_are_those_of_ddp(world: World) -> None:
    against_ddp(world, ByHand)
    against_ddp(world, OwnClipping, gradient_clip_val=0.05)


@on_ranks(2)
def test_a_model_built_in_configure_model_is_initialized_sharded(world: World) -> None:
    enter(world)
    curves = []
    for inside, explicit in ((False, False), (True, False), (True, True)):
        module = Language(world.seed, in_configure_model=inside)
        if explicit:
            plainly = module.build

            def construct(plainly: Any = plainly) -> Any:
                with zero_ext.Init({"stage": 3}):
                    return plainly()

            module.build = construct  # type: ignore[method-assign]
        strategy = Watching(3)
        trainer(world, strategy, max_epochs=1).fit(module, loader(world.seed))
        assert strategy.initialized_sharded == inside
        curves.append(module.losses)
    assert curves[0] == curves[1] == curves[2]


@on_ranks(2)
def test_precisions_train_in_their_dtype_with_fp32_masters(world: World) -> None:
    enter(world)
    names = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-true": "fp16"}
    reference = Language(world.seed)
    trainer(world, ZeroStrategy(3), max_epochs=2).fit(reference, loader(world.seed))
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names]
    cases[2][1]["loss_scale"] = {"initial_power": 8}  # so that no step is skipped and the curves compare
    for precision, config in (*cases, ("32-true", {"precision": {"dtype": "bf16"}})):
        module = Language(world.seed)
        made = trainer(world, ZeroStrategy(3, config), max_epochs=2, precision=precision)
        made.fit(module, loader(world.seed))
        engine = engine_of(module)
        assert engine.config.precision.dtype == names.get(precision, "bf16")
        wanted = torch.float16 if precision == "16-true" else torch.bfloat16
        assert {parameter.dtype for parameter in module.parameters()} == {wanted}
        assert engine.optimizer_step.scales_loss == (precision == "16-true")
        assert largest_difference(module.losses, reference.losses) < 0.05, precision
        assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FORMS[form](tmp_path)
    check(ZeroStrategy(config=source).config)
    monkeypatch.setenv("ZERO_EXT_CONFIG", "gradient_clipping=0.5")
    assert ZeroStrategy(config=source).config.gradient_clipping == 0.5
    scale = {"enabled": "auto", "initial_scale_power": 20}
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 1}, "fp16": scale})
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")
    assert strategy.config.precision.dtype == "fp16" and strategy.config.loss_scale.initial_power == 20


def test_contradictions_show_both_sides() -> None:
    with pytest.raises(ConfigError, match=r"stage: config has 2 .*stage=1 .*Make them agree"):
        ZeroStrategy(1, {"stage": 2})
    assert ZeroStrategy(2, {"stage": 2}).config.stage == ZeroStrategy(config={"stage": 2}).config.stage == 2
    assert ZeroStrategy().config.stage == 3
    with pytest.raises(ConfigError, match="configure_optimizers makes the optimizer"):
        ZeroStrategy(config={"optimizer": {"type": "AdamW"}})
    with pytest.raises(ConfigError, match="save_top_k"):
        ZeroStrategy(config={"checkpoint": {"keep_last": 2}})
    with pytest.raises(ConfigError, match="Did you mean"):
        ZeroStrategy(config={"stag": 2})


@on_ranks(1)
def test_what_the_trainer_cannot_ask_for(world: World) -> None:
    enter(world)
    data = loader(world.seed)
    with pytest.raises(ConfigError, match=r"config has 'fp16' .*precision='bf16-mixed' means 'bf16'"):
        trainer(world, ZeroStrategy(3, {"precision": {"dtype": "fp16"}}), precision="bf16-mixed")
    with pytest.raises(ValueError, match=r"'bf16-mixed'.*DoublePrecision"):
        trainer(world, ZeroStrategy(), precision="64-true")
    with pytest.raises(ValueError, match="DoublePrecision"):
        trainer(world, ZeroStrategy(precision_plugin=DoublePrecision()))
    with pytest.raises(ValueError, match="got TorchCheckpointIO"):
        trainer(world, ZeroStrategy(), plugins=[TorchCheckpointIO()])
    with pytest.raises(ConfigError, match=r"config has 3, Trainer\(accumulate_grad_batches=2\)"):
        config = {"batch": {"gradient_accumulation_steps": 3}}
        trainer(world, ZeroStrategy(2, config), accumulate_grad_batches=2).fit(Language(1), data)
    with pytest.raises(ConfigError, match=r"config has 1.0, Trainer\(gradient_clip_val=0.5\)"):
        config = {"gradient_clipping": 1.0}
        trainer(world, ZeroStrategy(2, config), gradient_clip_val=0.5).fit(Language(1), data)
    with pytest.raises(ConfigError, match=r"'value'.*Use 'norm'"):
        made = trainer(world, ZeroStrategy(), gradient_clip_val=0.5, gradient_clip_algorithm="value")
        made.fit(Language(1), data)
    module = TwoOptimizers(1)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="expected one torch optimizer"):
        trainer(world, ZeroStrategy()).fit(module, data)


@on_ranks(1)
def test_what_cannot_be_stored_is_named(world: World) -> None:
    enter(world)
    for name, message in (("mine", r"client_state\.lightning\.mine"), ("state_dict", "got \\['lost'\\]")):
        module = Unstorable(1)
        module.rate_name = name
        made = trainer(world, ZeroStrategy(), max_steps=1)
        made.fit(module, loader(1))
        with pytest.raises((TypeError, ValueError), match=message):
            made.save_checkpoint("never-written")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "ray"):
        package = f"zero_ext.integrations.{name}"
        monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None)
        monkeypatch.delitem(sys.modules, package, raising=False)
        with pytest.raises(
            ImportError, match=rf"{name}.* is not installed.*pip install 'zero_ext\[integrations\]'"
        ):
            importlib.import_module(package)
        monkeypatch.undo()
