"""From a model to units: grouping, sharded init, materializing, and checks before anything is sharded."""
