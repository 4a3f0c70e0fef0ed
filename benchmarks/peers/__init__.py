"""The contenders of the step and memory benchmarks: zero_ext and what a user would run instead."""

from benchmarks.peers.base import Trainer
from benchmarks.peers.contenders import CONTENDERS, Contender, contender_named, titles_of, trainer_class

__all__ = ["CONTENDERS", "Contender", "Trainer", "contender_named", "titles_of", "trainer_class"]
