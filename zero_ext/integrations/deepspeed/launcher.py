"""The names of DeepSpeed's launcher that scripts and Accelerate read. Ranks are started by other means."""

from __future__ import annotations

import os

from zero_ext.integrations.deepspeed.unsupported import names_of

# The file of variables for ranks on other hosts, which only DeepSpeed's launcher reads.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

__getattr__ = names_of("deepspeed.launcher")
