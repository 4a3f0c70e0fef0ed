"""Hugging Face Accelerate on sharded models: ``ZeroAccelerator(config=...)`` instead of ``Accelerator()``."""

from importlib.util import find_spec

if find_spec("accelerate") is None:
    raise ImportError(
        "zero_ext.integrations.accelerate: the package accelerate is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install 'accelerate>=1.10'."
    )

from zero_ext.integrations.accelerate.zero_accelerator import ZeroAccelerator

__all__ = ["ZeroAccelerator"]
