"""The private names of the Trainer: all that are used are listed, and a release without one is refused."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import Trainer

import zero_ext
from tests.docs.test_compatibility import pinned, required
from tests.integrations.transformers.models import arguments, llama
from zero_ext.integrations.peft import ZeroPeftTrainerMixin
from zero_ext.integrations.transformers import ZeroTrainer, ZeroTrainerMixin, private_methods
from zero_ext.integrations.transformers.layout_trainer import LayoutTrainerMixin
from zero_ext.integrations.transformers.private_methods import ATTRIBUTES, NEWEST, OLDEST, OVERRIDDEN

MIXINS = (LayoutTrainerMixin, ZeroTrainerMixin, ZeroPeftTrainerMixin)
ROOT = Path(zero_ext.__file__).resolve().parents[1]


def names_used() -> set[str]:
    """Private names that the sources of the mixins use of themselves or the class before them."""
    trees = [ast.parse(Path(inspect.getfile(each)).read_text()) for each in MIXINS]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("self", "super()", "trainer")
        and re.match("_[a-z]", node.attr)
    }


def test_every_private_name_of_the_trainer_is_listed() -> None:
    defined = {name for each in MIXINS for name in vars(each)}
    inside = {name for name in dir(Trainer) if re.match("_[a-z]", name)}
    inside |= set(inspect.unwrap(Trainer.__init__).__code__.co_names)
    assert set(OVERRIDDEN) == defined & inside
    assert set(OVERRIDDEN) | set(ATTRIBUTES) == (names_used() | defined) & inside


def test_the_versions_are_those_that_are_required_and_tested() -> None:
    assert required()["transformers"] + ".0" == OLDEST
    assert pinned()["transformers"] == NEWEST
    assert f"transformers=={OLDEST} " in (ROOT / "Makefile").read_text()
    assert transformers.__version__ in (OLDEST, NEWEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda patch: patch.setattr(private_methods.transformers, "__version__", "5.2.9"),
            r"expected 5\.3\.0 or newer.*5\.2\.9",
        ),
        (
            lambda patch: patch.setattr(private_methods.transformers, "__version__", "6.0.0"),
            r"below 6.*got 6\.0\.0",
        ),
        (lambda patch: patch.delattr(Trainer, "_save_scaler"), "without Trainer._save_scaler"),
        (
            lambda patch: patch.setattr(Trainer, "_prepare_for_training", Trainer.log),
            "without Trainer._created_lr_scheduler",
        ),
    ],
)
def test_another_release_is_refused_before_the_model_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
) -> None:
    model = llama(0)
    cache, built = model.config.use_cache, Trainer(llama(0), arguments(tmp_path))
    change(monkeypatch)
    for make in (
        lambda: ZeroTrainer(model=model, args=arguments(tmp_path)),
        lambda: zero_ext.shard_trainer(built),
    ):
        with pytest.raises(ImportError, match=words):
            make()
    assert model.config.use_cache == cache and type(built) is Trainer
