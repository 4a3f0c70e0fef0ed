"""``deepspeed.ops``: optimizers and file I/O."""

from zero_ext.integrations.deepspeed.ops import adagrad, adam, aio, lamb, lion
from zero_ext.integrations.deepspeed.refused import refused_names

__all__ = ["adagrad", "adam", "aio", "lamb", "lion"]

__getattr__ = refused_names("deepspeed.ops")
