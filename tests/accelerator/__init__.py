"""A stand-in accelerator for tests: device ``stand_in``, whose memory the host cannot touch."""

from tests.accelerator.stand_in import enable

__all__ = ["enable"]
