"""Trainers of others, sharded as they are: one that is built, or all that a script makes."""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

from transformers import Trainer

from zero_ext.config.sources.config_source import ConfigSource, read_config
from zero_ext.integrations.transformers.private_methods import check_transformers
from zero_ext.integrations.transformers.trainer import ZeroTrainerMixin

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def shard_trainer(trainer: AnyTrainer, config: ConfigSource = None) -> AnyTrainer:
    """Have a Trainer that is built, of any class, shard its model when training or evaluation begins.

    The object gets a class with [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin]
    before its own one. A model that the Trainer has moved to the accelerator was whole there until then:
    put the mixin before the class itself where it is too large for that.

    Args:
        trainer: not trained yet.
        config: as `zero_config` of the mixin.

    Returns:
        The same `trainer`.

    Raises:
        ValueError: it is sharded already, or has trained. Else as the mixin, and nothing was changed.
    """
    if isinstance(trainer, ZeroTrainerMixin):
        raise ValueError(f"{type(trainer).__name__}: it shards its model already. Pass its own zero_config.")
    if trainer.state.global_step:
        raise ValueError(f"{type(trainer).__name__}: expected one that has not trained yet. Build it anew.")
    written, own = read_config(config), type(trainer)
    trainer.__class__ = sharded_class(own)
    sharded: Any = trainer
    try:
        sharded._written = written
        sharded._check_configuration()
    except Exception:
        trainer.__class__ = own
        vars(trainer).pop("_written", None)
        raise
    # The parameters are in compute precision: as the mixin makes the accelerator.
    accelerator = trainer.accelerator
    accelerator.native_amp, accelerator.scaler = False, None
    accelerator.state._mixed_precision = "no"
    return trainer


def shard_all_trainers(config: ConfigSource = None) -> None:
    """Have every Trainer that is made from now on shard its model; once per process.

    `zero-ext run --config FILE` calls it when a script imports the Trainer.

    Args:
        config: as `zero_config` of [`ZeroTrainerMixin`][zero_ext.integrations.transformers.ZeroTrainerMixin];
            by default what the environment variable `ZERO_EXT_CONFIG` says.
    """
    plain = Trainer.__init__
    if getattr(plain, "__wrapped__", None) is not None and plain.__module__ == __name__:
        return

    @functools.wraps(plain)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self, ZeroTrainerMixin):
            plain(self, *args, **kwargs)
            return
        self.__class__ = sharded_class(type(self))
        self._written = read_config(config)
        plain(self, *args, **kwargs)
        self._check_configuration()

    initialize.__module__ = __name__
    Trainer.__init__ = initialize


def sharded_class(own: type[Trainer]) -> type[Trainer]:
    """Return the class ``own`` with the mixin before it, that for adapters where PEFT is in use."""
    check_transformers()
    mixin: type = ZeroTrainerMixin
    if "peft" in sys.modules:
        from zero_ext.integrations.peft import ZeroPeftTrainerMixin

        mixin = ZeroPeftTrainerMixin
    return type(f"Zero{own.__name__}", (mixin, own), {"__module__": own.__module__})
