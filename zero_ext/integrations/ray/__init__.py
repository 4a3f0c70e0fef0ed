"""Ray Train: checkpoints of a sharded model as Ray's own, and resuming from them.

``zero_ext.prepare`` needs nothing of this: inside a ``TorchTrainer``'s loop it takes the process group that
Ray has started.
"""

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ImportError(
        "zero_ext.integrations.ray: the package ray[train] is not installed. Install it with "
        "pip install 'zero_ext[integrations]' or pip install 'ray[train]>=2.60'."
    )

from zero_ext.integrations.ray.ray_checkpoints import report, resume

__all__ = ["report", "resume"]
