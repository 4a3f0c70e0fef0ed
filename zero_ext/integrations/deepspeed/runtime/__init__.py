"""``deepspeed.runtime``: schedules, configuration models, loaders."""

from zero_ext.integrations.deepspeed.unsupported import names_of

__getattr__ = names_of("deepspeed.runtime")
