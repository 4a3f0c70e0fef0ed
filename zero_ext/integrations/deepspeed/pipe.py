"""``deepspeed.pipe``: refused by name, but for the topology of ranks."""

from zero_ext.integrations.deepspeed import topology
from zero_ext.integrations.deepspeed.refused import refused_names

__all__ = ["topology"]

__getattr__ = refused_names("deepspeed.pipe")
