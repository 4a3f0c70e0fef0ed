"""``deepspeed.ops``: optimizers and file I/O."""

from zero_ext.integrations.deepspeed.git_version_info import installed_ops
from zero_ext.integrations.deepspeed.unsupported import names_of

__compatible_ops__ = installed_ops
__getattr__ = names_of("deepspeed.ops")
