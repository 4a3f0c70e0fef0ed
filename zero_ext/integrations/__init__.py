"""Bridges to other libraries' ways of training."""

from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.integrations.sequence_parallel import apply_sequence_parallel

__all__ = ["apply_sequence_parallel", "prepare"]
