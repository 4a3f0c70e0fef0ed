"""Transformers' conversions of weights as plans of reads: experts that are stacked, gate and up projections
that are concatenated, matrices that are transposed."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from zero_ext.checkpoint.format.tensor_files import WeightFiles, converts
from zero_ext.checkpoint.load_plan import refuse_misfits
from zero_ext.checkpoint.weights.block_map import BlockMap, UnsupportedConversion
from zero_ext.checkpoint.weights.file_tensor import FileTensor
from zero_ext.checkpoint.weights.load_into_meta import NamedTensors
from zero_ext.config.config_errors import clause_of

_MOST_SHOWN = 8
_FIX = "Load the files of this model."


class ConvertedWeights:
    """The weights of ``model``, which is on the meta device, as transformers makes them of tensors in
    files."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._shapes: dict[str, torch.Tensor] = model.state_dict()
        self._rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]

    def used_rules(self) -> list[Any]:
        """Return the conversions that some tensor of the files needed: saving the model reverts them."""
        # The oldest supported releases do not record it, and revert all.
        return [rule for rule in self._rules if not hasattr(rule, "was_used") or rule.was_used()]

    def __call__(self, files: WeightFiles) -> NamedTensors:
        """Return the tensors of the model by name.

        ValueError if a tensor is in the files twice, or lacks some of its experts, if experts are in a layout
        that no conversion reads, or if a conversion computes with values.
        """
        sources: dict[str, _Sources] = {}
        unexpected: dict[str, str] = {}
        # Neighbors are stacked in this order, and some renamings need it.
        for key in sorted(files.tensors, key=dot_natural_key):
            name, pattern = self._renamed(key)
            if name not in self._shapes:
                unexpected[key] = name
                continue
            sources.setdefault(name, _Sources(name)).add(key, pattern)
        problems = [
            each
            for one in sources.values()
            for each in one.problems(self._converters, self._shapes[one.name].shape, files)
        ]
        refuse_misfits("weights: they do not fit the model", problems, _FIX)
        made: dict[str, BlockMap] = {}
        for one in sources.values():
            for target, blocks in self._converted(one, files).items():
                if target in made:
                    problems.append(f"{target!r}: expected it once, got it from {one.shown} and others")
                made[target] = blocks
        refuse_misfits("weights: they do not fit the model", problems, _FIX)
        self._refuse_other_layouts(made, unexpected)
        return NamedTensors(made, list(unexpected))

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the converter for it."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._shapes)
        if name not in self._shapes and key in self._shapes:
            name, pattern = rename_source_key(key, [], [], prefix, self._shapes)
        return name, pattern

    def _converted(self, sources: _Sources, files: WeightFiles) -> dict[str, BlockMap]:
        """Return what the files' tensors of ``sources`` become."""
        tensors = {key: files.tensors[key][1].entry for key in sources.keys}
        if sources.is_plain:
            ((key, entry),) = tensors.items()
            return {sources.name: BlockMap.stored(key, entry.shape)}
        dtype = self._shapes[sources.name].dtype
        stored = sorted({str(each.dtype) for each in tensors.values() if not converts(each.dtype, dtype)})
        if stored:
            raise ValueError(f"{sources.name!r}: expected {dtype}, got {', '.join(stored)}. {_FIX}")
        converter = deepcopy(sources.converter(self._converters))
        for pattern, keys in sources.patterns.items():
            for key in keys:
                blocks = BlockMap.stored(key, tensors[key].shape)
                converter.add_tensor(sources.name, key, pattern, FileTensor(blocks, dtype))
        try:
            found = converter.convert(sources.name, model=self._model, config=self._model.config)
        except UnsupportedConversion as error:
            kind, reason = type(self._model).__name__, str(error).partition(". ")[0]
            raise ValueError(
                f"{kind}: {sources.name!r} cannot be read shard by shard from {sources.shown} ({reason}). "
                f"Load it inside zero_ext.Init(config) with {kind}.from_pretrained(folder), which needs "
                "memory for full tensors."
            ) from error
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{sources.name!r}: it cannot be assembled from {sources.shown}: {clause_of(error)}. {_FIX}"
            ) from error
        return {
            name: (value[0] if isinstance(value, list) else value).blocks for name, value in found.items()
        }

    def _refuse_other_layouts(self, made: dict[str, BlockMap], unexpected: dict[str, str]) -> None:
        """Raise ``ValueError`` if stacked experts are missing, and the files have others in their module.

        ``unexpected`` has names in the files, and the names that the model would have for them. Experts
        initialized anew would train without an error.
        """
        for name, tensor in self._shapes.items():
            module = f"{name.rpartition('.')[0]}."
            if tensor.dim() < 3 or name in made or ".experts." not in f".{module}":
                continue
            prefix = self._model.base_model_prefix
            others = [key for key, other in unexpected.items() if module in f"{prefix}.{other}"]
            if others:
                raise ValueError(
                    f"{name!r}: expected it in the files, or experts that transformers converts to it, got "
                    f"{_shown(others)}. Convert the files to the layout that save_pretrained writes."
                )


class _Sources:
    """The tensors of the files that make up the tensor ``name`` of a model, by the pattern of a converter."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.patterns: dict[str | None, list[str]] = {}

    def add(self, key: str, pattern: str | None) -> None:
        self.patterns.setdefault(pattern, []).append(key)

    @property
    def keys(self) -> list[str]:
        """All names in the files."""
        return [key for keys in self.patterns.values() for key in keys]

    @property
    def shown(self) -> str:
        """Some names in the files."""
        return _shown(self.keys)

    @property
    def is_plain(self) -> bool:
        """True if no conversion is needed."""
        return None in self.patterns

    def converter(self, converters: list[WeightConverter]) -> WeightConverter:
        """Return the one that has the patterns."""
        return next(each for each in converters if self.patterns.keys() & set(each.source_patterns))

    def problems(self, converters: list[WeightConverter], shape: torch.Size, files: WeightFiles) -> list[str]:
        """Return what prevents a tensor of ``shape`` from being assembled."""
        if self.is_plain:
            return [] if len(self.keys) == 1 else [f"{self.name!r}: expected it once, got {self.shown}"]
        converter = self.converter(converters)
        if not self.patterns.keys() <= set(converter.source_patterns):
            return [f"{self.name!r}: expected it in one layout, got {self.shown}"]
        first = converter.operations[0]
        if not isinstance(first, MergeModulelist) or len(converter.target_patterns) > 1:
            return []
        found = []
        numbers = {pattern: _numbers(self.patterns.get(pattern, [])) for pattern in converter.source_patterns}
        count = max(shape[first.dim], *(1 + max(each, default=0) for each in numbers.values()))
        for pattern, each in numbers.items():
            absent = sorted(set(range(count)) - set(each))
            twice = sorted(number for number in set(each) if each.count(number) > 1)
            if each and (absent or twice):
                what = f"got none for {absent[:_MOST_SHOWN]}" if absent else f"got {twice} twice"
                found.append(f"{self.name!r}: expected experts 0 to {count - 1} in '{pattern}', {what}")
            elif pattern not in self.patterns:
                found.append(f"{self.name!r}: expected experts 0 to {count - 1} in '{pattern}', got none")
            found += _different_shapes(self.patterns.get(pattern, []), files)
        return found


def _different_shapes(keys: list[str], files: WeightFiles) -> list[str]:
    """Return what to say about tensors with another shape than most."""
    shapes = {key: files.tensors[key][1].entry.shape for key in keys}
    usual = Counter(shapes.values()).most_common(1)
    return [
        f"{key!r}: expected shape {usual[0][0]} as other experts have, got {shape}"
        for key, shape in shapes.items()
        if shape != usual[0][0]
    ]


def _numbers(keys: list[str]) -> list[int]:
    """Return the number by which names differ; none if they differ otherwise."""
    columns = list(zip(*(key.split(".") for key in keys), strict=False))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) != 1 or not all(number.isdecimal() for number in varying[0]):
        return []
    return [int(number) for number in varying[0]]


def _shown(keys: list[str]) -> str:
    more = f" and {len(keys) - 2} others" if len(keys) > 2 else ""
    return ", ".join(map(repr, keys[:2])) + more
