"""Scripts with Accelerate, sharded as they are."""

from __future__ import annotations

import functools
import sys
from typing import Any

from accelerate import Accelerator

_TRAINER = "transformers.trainer"


def shard_all_accelerators() -> None:
    """Have every Accelerator that is made from now on be a `ZeroAccelerator`; once per process.

    Its configuration is that of the environment variable `ZERO_EXT_CONFIG`. A Trainer's own Accelerator
    stays as it is, because [`shard_all_trainers`][zero_ext.integrations.transformers.shard_all_trainers]
    shards the Trainer's models. `zero-ext run --config FILE` calls this when a script imports accelerate.

    Raises:
        TypeError: (from then on, where one is made) it is of another class than Accelerator, with methods
            of its own.
    """
    plain = Accelerator.__init__
    if plain.__module__ == __name__:
        return

    @functools.wraps(plain)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        # Imported late, because it imports transformers, which may be what imports accelerate.
        from zero_ext.integrations.accelerate import ZeroAccelerator

        made_in = sys._getframe(1).f_globals.get("__name__")
        if isinstance(self, ZeroAccelerator) or made_in == _TRAINER:
            plain(self, *args, **kwargs)
            return
        if type(self) is not Accelerator:
            raise TypeError(
                f"{type(self).__name__}: expected accelerate's own Accelerator, got a subclass, which cannot "
                "be sharded as it is. Use zero_ext.ZeroAccelerator in the script, and leave --config out."
            )
        self.__class__ = ZeroAccelerator
        self.__init__(*args, **kwargs)

    initialize.__module__ = __name__
    Accelerator.__init__ = initialize
