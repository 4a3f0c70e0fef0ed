"""``deepspeed.ops``: optimizers and file I/O."""

from zero_ext.integrations.deepspeed.ops import adagrad, adam, aio, lamb, lion
from zero_ext.integrations.deepspeed.refused import names_of

__all__ = ["adagrad", "adam", "aio", "lamb", "lion"]

__getattr__ = names_of("deepspeed.ops")
