"""Lightning's Trainer and Fabric on sharded models: ``Trainer(strategy=ZeroStrategy(stage=3))``."""

from importlib.util import find_spec

if find_spec("lightning") is None:
    raise ImportError(
        "zero_ext.integrations.lightning: the package lightning is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install 'lightning>=2.5'."
    )

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zero_ext.integrations.lightning.fabric_strategy import ZeroFabricStrategy
from zero_ext.integrations.lightning.strategy import ZeroStrategy

ZeroStrategy.register_strategies(StrategyRegistry)
ZeroFabricStrategy.register_strategies(STRATEGY_REGISTRY)

__all__ = ["ZeroFabricStrategy", "ZeroStrategy"]
