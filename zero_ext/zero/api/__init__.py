"""The objects that users hold: prepare, module, optimizer, full parameters, ``param.grad``, state for
checkpoints."""
