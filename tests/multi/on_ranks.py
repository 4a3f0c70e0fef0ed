"""``@on_ranks(1, 2, 3)``: the body of a test runs on every rank of the pool."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.multi.pool import RankPool


def on_ranks(
    *world_sizes: int, stand_in: bool = False, by_turns: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes ``def test_x(world, ...)`` a test over ``world_sizes``; further parameters come from parametrize.

    The body asserts on each rank by itself; a rank's failure is the test's. It must not use fixtures. With
    ``stand_in`` the ranks have the stand-in accelerator, the device ``stand_in``. With ``by_turns`` a commit
    runs a share of the test's cases, each on one of the numbers of ranks, and the next commit others.
    """
    pool_fixture = "stand_in_pool" if stand_in else "rank_pool"

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        def test(world_size: int, **arguments: Any) -> None:
            pool: RankPool = arguments.pop(pool_fixture)
            pool.run(world_size, f"{body.__module__}:{body.__name__}", arguments)

        own = list(inspect.signature(body).parameters.values())[1:]
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (pool_fixture, "world_size")
        ]
        rest = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        test.__signature__ = inspect.Signature(parameters + rest)  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.__dict__.update(body.__dict__)  # the marks of inner decorators
        test.on_one_rank = body  # type: ignore[attr-defined]
        if by_turns:
            test = pytest.mark.by_turns(*world_sizes)(test)
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate
