"""``deepspeed.runtime``: schedules, configuration models, loaders."""

from zero_ext.integrations.deepspeed.refused import names_of

__getattr__ = names_of("deepspeed.runtime")
