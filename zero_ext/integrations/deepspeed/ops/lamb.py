"""``deepspeed.ops.lamb``: refused by name."""

from zero_ext.integrations.deepspeed.refused import refused_names

__getattr__ = refused_names("deepspeed.ops.lamb")
