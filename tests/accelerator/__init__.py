"""A stand-in accelerator for tests: device ``stand_in``, whose memory the host cannot touch."""

from tests.accelerator.stand_in import enable, is_enabled

__all__ = ["enable", "is_enabled"]
