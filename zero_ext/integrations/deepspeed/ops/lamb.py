"""``deepspeed.ops.lamb``: refused by name."""

from zero_ext.integrations.deepspeed.refused import names_of

__getattr__ = names_of("deepspeed.ops.lamb")
