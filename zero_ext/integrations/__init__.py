"""Bridges to other libraries' ways of training."""

from zero_ext.integrations.initialize import TrainingModule, initialize
from zero_ext.integrations.prepare_with_features import prepare
from zero_ext.integrations.sequence_parallel import apply_sequence_parallel

__all__ = ["TrainingModule", "apply_sequence_parallel", "initialize", "prepare"]
