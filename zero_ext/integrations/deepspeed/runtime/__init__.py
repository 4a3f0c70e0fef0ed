"""``deepspeed.runtime``: schedules, configuration models, loaders."""

from zero_ext.integrations.deepspeed.refused import refused_names
from zero_ext.integrations.deepspeed.runtime import config, dataloader, lr_schedules

__all__ = ["config", "dataloader", "lr_schedules"]

__getattr__ = refused_names("deepspeed.runtime")
