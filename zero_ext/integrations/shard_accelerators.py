"""Scripts with Accelerate, sharded as they are."""

from __future__ import annotations

import functools
import sys
from typing import Any

from accelerate import Accelerator
from torch import nn

_TRAINER = "transformers.trainer"


def shard_all_accelerators() -> None:
    """Have every Accelerator that is made from now on be a `ZeroAccelerator`; once per process.

    Its configuration is that of the environment variable `ZERO_EXT_CONFIG`. A Trainer's own Accelerator
    stays as it is, because [`shard_all_trainers`][zero_ext.integrations.transformers.shard_all_trainers]
    shards the Trainer's models. `zero-ext run --config FILE` calls this when a script imports accelerate.

    An Accelerator that cannot be one, because the configuration does not suit it or because it is of a
    class of the script's own, stays as it is, and raises why when it prepares a model. With a Trainer,
    scripts make one only to ask for the rank.
    """
    plain = Accelerator.__init__
    if plain.__module__ == __name__:
        return

    @functools.wraps(plain)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        # Imported late, because it imports transformers, which may be what imports accelerate.
        from zero_ext.integrations.accelerate import ZeroAccelerator

        made_in = sys._getframe(1).f_globals.get("__name__")
        reason: Exception | None = None
        if isinstance(self, ZeroAccelerator) or made_in == _TRAINER:
            pass
        elif type(self) is Accelerator:
            self.__class__ = ZeroAccelerator
            try:
                self.__init__(*args, **kwargs)
                return
            except ValueError as error:  # nothing was set up yet
                self.__class__, reason = Accelerator, error
        else:
            reason = TypeError(
                f"{type(self).__name__}: expected accelerate's own Accelerator, got a subclass, which cannot "
                "be sharded as it is. Use zero_ext.ZeroAccelerator in the script, and leave --config out."
            )
        plain(self, *args, **kwargs)
        if reason is not None:
            for name in ("prepare", "prepare_model"):
                setattr(self, name, functools.partial(_refuse_models, reason, getattr(self, name)))

    initialize.__module__ = __name__
    Accelerator.__init__ = initialize


def _refuse_models(reason: Exception, plain: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(each, nn.Module) for each in (*args, *kwargs.values())):
        raise reason
    return plain(*args, **kwargs)
