"""Worlds of exactly the wanted size: a Trainer takes all ranks of the default group."""

from tests.integrations.rank_pools import pool_fixture
from tests.multi.pool import preload
from tests.multi.worlds import Worlds

preload("transformers.trainer", "tests.integrations.transformers.models")
rank_pool = pool_fixture(Worlds)
