"""Lightning's Trainer on sharded models: ``Trainer(strategy=ZeroStrategy(stage=3))``."""

from importlib.util import find_spec

if find_spec("lightning") is None:
    raise ImportError(
        "zero_ext.integrations.lightning: the package lightning is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install 'lightning>=2.5'."
    )

from zero_ext.integrations.lightning.strategy import ZeroStrategy

__all__ = ["ZeroStrategy"]
