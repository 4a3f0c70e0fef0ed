"""``deepspeed.utils``: state of single parameters, leaf modules, logging, models on the meta device."""

from zero_ext.integrations.deepspeed.unsupported import names_of

__getattr__ = names_of("deepspeed.utils")
