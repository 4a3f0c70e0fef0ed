"""Names of DeepSpeed: their definitions, their modules in zero_ext, and notes on them."""

from zero_ext.integrations.deepspeed.registry.mirrors import mirror_of, nearest_mirror
from zero_ext.integrations.deepspeed.registry.names import Definition, names
from zero_ext.integrations.deepspeed.registry.notes import difference_of, reason_of

__all__ = ["Definition", "difference_of", "mirror_of", "names", "nearest_mirror", "reason_of"]
