"""Batch sizes: any two give the third, contradictions are refused with all values named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_ext.config import BatchConfig, ConfigError, load_config

calm = settings(deadline=None)
small = st.integers(1, 64)


@calm
@given(micro=small, steps=small, ranks=small)
def test_any_two_determine_the_third(micro: int, steps: int, ranks: int) -> None:
    train = micro * steps * ranks
    complete = BatchConfig(train_batch_size=train, micro_batch_size=micro, gradient_accumulation_steps=steps)
    assert complete.resolve(ranks) == complete
    for missing in ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps"):
        rest = {name: value for name, value in complete.to_mapping().items() if name != missing}
        assert BatchConfig(**rest).resolve(ranks) == complete


@calm
@given(train=small, micro=small, steps=small, ranks=small)
def test_never_a_wrong_product(train: int, micro: int, steps: int, ranks: int) -> None:
    values = {"train_batch_size": train, "micro_batch_size": micro, "gradient_accumulation_steps": steps}
    for missing in (None, *values):
        policy = BatchConfig(**{name: value for name, value in values.items() if name != missing})
        try:
            found = policy.resolve(ranks)
        except ConfigError as error:
            assert f"{ranks} rank" in str(error)
            assert all(f"{name}=" in str(error) for name in values)
            continue
        assert found.micro_batch_size is not None
        assert found.train_batch_size == found.micro_batch_size * found.gradient_accumulation_steps * ranks
        assert all(getattr(found, name) == value for name, value in values.items() if name != missing)


def test_one_size_alone_and_none() -> None:
    assert BatchConfig(train_batch_size=12).resolve(3).micro_batch_size == 4
    assert BatchConfig(micro_batch_size=4).resolve(3).train_batch_size == 12
    nothing = BatchConfig(gradient_accumulation_steps=5).resolve(2)
    assert (nothing.train_batch_size, nothing.micro_batch_size) == (None, None)
    assert nothing.gradient_accumulation_steps == 5


def test_a_default_accumulation_is_not_a_said_one() -> None:
    unsaid = load_config({"batch": {"train_batch_size": 16, "micro_batch_size": 4}})
    assert unsaid.batch.resolve(2).gradient_accumulation_steps == 2
    again = load_config(unsaid.to_mapping())
    assert again.batch.resolve(2).gradient_accumulation_steps == 2
    assert unsaid.replace(stage=1).batch.resolve(2).gradient_accumulation_steps == 2
    said = BatchConfig(train_batch_size=16, micro_batch_size=4, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=1 on 2 rank"):
        said.resolve(2)


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "2"])
def test_world_size_is_checked(ranks: object) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        BatchConfig(train_batch_size=16).resolve(ranks)  # type: ignore[arg-type]


def test_what_was_not_said_can_be_left_out_of_a_dump() -> None:
    said = BatchConfig.from_mapping({"micro_batch_size": 4})
    assert said.model_dump(exclude_unset=True) == {"micro_batch_size": 4}
    assert said.resolve(2).model_dump(exclude_unset=True)["gradient_accumulation_steps"] == 1
