"""``deepspeed.runtime``: schedules, configuration models, loaders."""

from zero_ext.integrations.deepspeed.refused import names_of
from zero_ext.integrations.deepspeed.runtime import config, dataloader, lr_schedules

__all__ = ["config", "dataloader", "lr_schedules"]

__getattr__ = names_of("deepspeed.runtime")
