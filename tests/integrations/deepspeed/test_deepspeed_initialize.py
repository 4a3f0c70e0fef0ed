"""What ``deepspeed.initialize`` logs on one rank."""

from __future__ import annotations

import logging
import secrets

import pytest
from torch import nn

from zero_ext.integrations import deepspeed


def test_keys_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    key = f"zero_optimization.{secrets.token_hex(8)}"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, key: 1}
    with caplog.at_level(logging.INFO, logger="zero_ext"):
        for _ in range(2):
            deepspeed.initialize(model=nn.Linear(2, 1), config=config)
    found = [record for record in caplog.records if key in record.getMessage()]
    assert [record.levelno for record in found] == [logging.INFO]
    assert f"{key}: no effect" in found[0].getMessage()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
