"""``deepspeed.pipe``: refused by name, but for the topology of ranks."""

from zero_ext.integrations.deepspeed import topology
from zero_ext.integrations.deepspeed.refused import names_of

__all__ = ["topology"]

__getattr__ = names_of("deepspeed.pipe")
