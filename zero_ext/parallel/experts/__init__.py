"""Expert parallelism: a mixture of experts, each on some of the data-parallel ranks; tokens go there."""

from zero_ext.parallel.experts.gating import Routing, balance_loss, route
from zero_ext.parallel.experts.moe_layer import MixtureOfExperts, MoEOutput

__all__ = ["MixtureOfExperts", "MoEOutput", "Routing", "balance_loss", "route"]
