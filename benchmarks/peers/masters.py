"""AdamW over float32 master weights in plain torch: the usual recipe for bfloat16 parameters."""

import torch

from benchmarks.peers.base import BETAS, CLIP_NORM, EPSILON, LEARNING_RATE, WEIGHT_DECAY, adamw


class MasterWeightAdamW:
    """float32 masters beside bfloat16 parameters, stepped by torch's fused AdamW.

    Widen the gradients to float32, clip by the global norm, step the masters, round them back into the
    parameters: the recipe of Micikevicius et al., Mixed Precision Training (2018), section 3.1. All four
    passes use torch's multi-tensor or fused kernels. The float32 gradient buffers are kept between steps,
    which is faster than allocating them anew.
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.masters = [parameter.detach().float() for parameter in parameters]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = gradient
        self.optimizer = adamw(self.masters)
        self.norm = torch.zeros(())

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' gradients, clipped to CLIP_NORM."""
        arrived = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(self.gradients, arrived)
        self.norm = torch.nn.utils.clip_grad_norm_(self.masters, CLIP_NORM)
        self.optimizer.step()
        torch._foreach_copy_([*self.parameters], self.masters)

    def zero_grad(self) -> None:
        """Drop the parameters' gradients."""
        for parameter in self.parameters:
            parameter.grad = None


class FrugalMasterWeightAdamW:
    """The same with as little memory as the recipe allows: a gradient is dropped once it is widened, the
    update goes tensor by tensor, nothing is kept between steps but masters and moments; no clipping."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=LEARNING_RATE,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            foreach=False,
        )

    @torch.no_grad()
    def step(self) -> None:
        """One update from the parameters' gradients, which are gone afterwards."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)
