"""Accelerate's ``save_state`` and ``load_state`` with sharded models in zero_ext's own format."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from zero_ext.checkpoint.api import load_checkpoint, save_checkpoint
from zero_ext.checkpoint.inspection import open_checkpoint
from zero_ext.zero.api.zero_module import ZeroModule

_STATE_FOLDER = "zero_ext"
_STEP = "accelerate_step"


class CheckpointingAccelerator(Accelerator):
    """An ``Accelerator`` that saves and loads sharded models as checkpoints of zero_ext."""

    _models: list[Any]
    _optimizers: list[Any]

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save models, optimizers and all else that training needs; a collective.

        Models and their optimizers go to folders of zero_ext's format, all else to Accelerate's own files.

        Args:
            output_dir: on storage that all ranks share.
            safe_serialization: no effect on models that are sharded.
            **save_model_func_kwargs: no effect.

        Returns:
            The folder.
        """
        models = self._sharded
        hooks = list(self._save_model_state_pre_hook.values())

        def save(_: Any, __: list[Any], folder: str) -> None:
            for path, model in zip(_folders(Path(folder), len(models)), models, strict=True):
                save_checkpoint(path, model, client_state={_STEP: self.step}, async_save=False, keep_last=1)
            # Hooks of scripts remove from the list the weights that they save themselves.
            weights: list[dict[str, Any]] = [{} for _ in every]
            for hook in hooks:
                hook(every, weights, folder)

        every = self._models
        with self._without_engines("_save_model_state_pre_hook", save):
            return super().save_state(output_dir, safe_serialization)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **model_kwargs: Any
    ) -> None:
        """Load what `save_state` saved, at any number of ranks, stage and tiers; a collective.

        Args:
            input_dir: the folder; default the newest one of automatic naming.
            load_kwargs: as in Accelerate.
            **model_kwargs: `map_location`, which has no effect on models that are sharded.

        Raises:
            ValueError: the folder is no such checkpoint, or of other models. Nothing was changed.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            named = Path(self.project_dir, "checkpoints")
            if not any(named.glob("checkpoint_*")):
                raise ValueError(
                    f"{named}: expected a checkpoint to load, got none. Pass a folder, or save one first."
                )
        models, step = self._sharded, None
        hooks = list(self._load_model_state_pre_hook.values())
        every = self._models

        def load(plain: list[Any], folder: str) -> None:
            nonlocal step
            step = _check_state(Path(folder), models)
            for path, model in zip(_folders(Path(folder), len(models)), models, strict=True):
                load_checkpoint(path, model)
            # A hook takes the models that it loads itself out of its list.
            left = list(every)
            for hook in hooks:
                hook(left, folder)
            plain[:] = [each for each in plain if any(each is one for one in left)]

        with self._without_engines("_load_model_state_pre_hook", load):
            super().load_state(input_dir, load_kwargs, **model_kwargs)
        if step is not None:
            self.step = step  # also on ranks that were not there when it was saved

    @property
    def _sharded(self) -> list[ZeroModule]:
        return [each for each in self._models if isinstance(each, ZeroModule)]

    @contextlib.contextmanager
    def _without_engines(self, name: str, hook: Any) -> Iterator[None]:
        """Hide sharded models and their optimizers from Accelerate, and call ``hook`` instead of its hooks
        ``name``."""
        models, optimizers, hooks = self._models, self._optimizers, getattr(self, name)
        self._models = [each for each in models if not isinstance(each, ZeroModule)]
        self._optimizers = []
        setattr(self, name, OrderedDict({0: hook}))
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            setattr(self, name, hooks)


def _check_state(folder: Path, models: Sequence[ZeroModule]) -> int | None:
    """Return Accelerate's count of micro-batches in ``folder``, None without models. ``ValueError`` if it has
    no checkpoints of as many models, ``CheckpointError`` if they are damaged."""
    paths = _folders(folder, len(models))
    found = [path.is_dir() for path in paths]
    if not all(found) or _folders(folder, len(models) + 1)[-1].exists():
        got = "one of another number of models" if any(found) else "another folder"
        raise _refused(folder, len(models), got)
    step = None
    for path in paths:
        state = open_checkpoint(path)[1].client_state
        step = state.get(_STEP) if isinstance(state, dict) else None
        if type(step) is not int:
            raise _refused(folder, len(models), "a checkpoint of another program")
    return step


def _refused(folder: Path, models: int, got: str) -> ValueError:
    return ValueError(
        f"{folder}: expected a folder of ZeroAccelerator.save_state with {models} model(s), got {got}. "
        "Prepare the models that were saved, or load weights alone with zero_ext.load_weights."
    )


def _folders(folder: Path, count: int) -> list[Path]:
    return [folder / (f"{_STATE_FOLDER}_{number}" if number else _STATE_FOLDER) for number in range(count)]
