"""Bridges to other libraries' ways of training."""

from zero_ext.integrations.initialize import initialize
from zero_ext.integrations.prepare import prepare
from zero_ext.integrations.sequence import split_sequence
from zero_ext.integrations.training_module import TrainingModule

__all__ = ["TrainingModule", "initialize", "prepare", "split_sequence"]
