"""``prepare`` with the sparse attention, chunks of tokens and monitors that a configuration asks for."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from torch import nn

from zero_ext.config import (
    ConfigError,
    LossConfig,
    MlpConfig,
    SparseAttentionConfig,
    ZeroConfig,
    load_config,
)
from zero_ext.config.config_errors import Problem, show
from zero_ext.integrations.adapter_checks import refuse_prompts
from zero_ext.zero.api.prepare import prepare as prepare_alone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PrepareParameters = ParamSpec("PrepareParameters")
Prepared = tuple[Any, Any]

# Of each section that computes in chunks: the models that it needs, and the call that other models use.
_CHUNKED = {
    "loss": ("causal language model", "linear_cross_entropy"),
    "mlp": ("model", "checkpoint_in_chunks"),
}
_CHUNKED_MODULES = "zero_ext.integrations.transformers.chunked_"


def _completed(prepare: Callable[PrepareParameters, Prepared]) -> Callable[PrepareParameters, Prepared]:
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def call(*args: PrepareParameters.args, **kwargs: PrepareParameters.kwargs) -> Prepared:
        bound = signature.bind(*args, **kwargs)
        settings = bound.arguments["config"] = load_config(bound.arguments.get("config"))
        _check_layout(settings, bound.arguments.get("process_group"))
        _refuse_prompts_before_documents(bound.arguments["model"])
        if settings.sparse_attention is not None:
            apply_sparse_attention(bound.arguments["model"], settings.sparse_attention)
        with _in_chunks(bound.arguments["model"], settings):
            if settings.monitor is None and settings.steps_per_print is None:
                return prepare(*bound.args, **bound.kwargs)
            # Whoever watches nothing imports none of it.
            from zero_ext.monitor.run_monitor import attach, check_packages

            check_packages(settings.monitor)
            model, optimizer = prepare(*bound.args, **bound.kwargs)
            attach(model, settings.monitor, steps_per_print=settings.steps_per_print)
            return model, optimizer

    return call


prepare = _completed(prepare_alone)


def _check_layout(settings: ZeroConfig, process_group: Any) -> None:
    """Raise ``ConfigError`` for a section `parallel` that the mesh does not have."""
    for name in ("cp", "ep"):
        wanted = getattr(settings.parallel, name)
        names = getattr(process_group, "mesh_dim_names", None) or ()
        length = process_group[name].size() if name in names else 1
        if wanted not in (1, length):
            raise ConfigError(
                Problem(
                    f"parallel.{name}",
                    f"got {wanted}, but process_group has {length} ranks along {name!r}. Use ZeroTrainer or "
                    "ZeroAccelerator. In a loop of your own remove the section, and call make_mesh.",
                )
            )


def _refuse_prompts_before_documents(model: nn.Module) -> None:
    # Without that module no attention is within documents.
    documents: Any = sys.modules.get("zero_ext.integrations.transformers.document_interface")
    if documents is not None and isinstance(model, nn.Module) and documents.has_document_attention(model):
        refuse_prompts(model)


def apply_sparse_attention(model: nn.Module, policy: SparseAttentionConfig) -> None:
    """Make attention sparse in all Hugging Face models in `model`; where it is sparse already, it stays.

    Raises:
        ConfigError: one of them cannot take the policy, there is none, or what is there follows another one;
            or the model is cut into stages. Nothing has been changed then.
    """
    if _is_staged(model):
        raise _refused(
            "the model is cut into pipeline stages, and some may have no attention. Leave the section out, "
            "and call sparsify_attention(model, ...) before apply_pipeline_parallel."
        )
    from zero_ext.attention import SparseSelfAttention

    present = [module for module in model.modules() if isinstance(module, SparseSelfAttention)]
    for module in present:
        if module.policy is not None and module.policy not in (policy, policy.in_a_model()):
            raise _refused(
                f"the configuration has {policy}, but the model has SparseSelfAttention with "
                f"{module.policy}. Make them agree, or leave the section out."
            )
    if present:
        return
    found = outermost_models(model)
    if not found:
        raise _refused(
            f"{type(model).__name__} is no model of transformers and has no SparseSelfAttention. Call "
            "zero_ext.attention.SparseSelfAttention(config.sparse_attention) in its attention, or leave the "
            "section out."
        )
    from zero_ext.integrations.transformers import attention_interface as interface

    for path, each in found.items():
        try:
            interface.exchangeable_attention(each)
        except ValueError as error:
            where = f"module '{path}': " if path else ""
            raise _refused(f"{where}{error} Or leave the section out.") from error
    interface.own_configurations(model)  # of all at once: what is around them holds them too
    for each in found.values():
        interface.exchange_attention(each, SparseSelfAttention(policy.in_a_model()))


def apply_chunks(
    model: nn.Module, section: Literal["loss", "mlp"], config: LossConfig | MlpConfig, **options: Any
) -> None:
    """Compute losses or feed-forward networks of all Hugging Face models in `model` in chunks of tokens.

    Args:
        model: with such models inside, or one itself.
        section: the name of the configuration's section.
        config: the section.
        **options: of the section's `chunking_problem`.

    Raises:
        ConfigError: there is none, one of them has another loss, head or network than is supported, or the
            model is cut into stages. Nothing has been changed then.
    """
    found = {} if _is_staged(model) else outermost_models(model)
    kind, function = _CHUNKED[section]
    if not found:
        raise _refused(
            f"expected a {kind} of transformers, got {type(model).__name__}. Call zero_ext.{function} in its "
            "forward, and leave the section out.",
            section,
        )
    chunked: Any = importlib.import_module(f"{_CHUNKED_MODULES}{section}")
    for path, each in found.items():
        if problem := chunked.chunking_problem(each, path, **options):
            raise _refused(problem, section)
    for each in found.values():
        getattr(chunked, f"chunk_{section}")(each, config.chunk_tokens)


@contextlib.contextmanager
def _in_chunks(model: nn.Module, settings: ZeroConfig) -> Iterator[None]:
    """Return a context in which losses and feed-forward networks are as the sections say. They are as before
    if it ends by an error."""
    losses, networks = _chunk_modules()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    hooks = [(each, found) for each in modules if losses and (found := losses.hooks_of_loss(each))]
    forwards = [(each, each.forward) for each in modules if networks and networks.is_chunked(each)]
    try:
        remove_chunks(model)
        if settings.loss is not None:
            apply_chunks(model, "loss", settings.loss)
        if settings.mlp is not None:
            apply_chunks(model, "mlp", settings.mlp, gathered_alone=_gathered_alone(settings))
        yield
    except BaseException:
        remove_chunks(model)
        for each, found in hooks:
            losses.register_hooks(each, found)
        for each, forward in forwards:
            each.forward = forward
        raise


def remove_chunks(model: nn.Module) -> None:
    """Undo :func:`apply_chunks`."""
    for section, chunked in zip(_CHUNKED, _chunk_modules(), strict=True):
        if chunked is not None and isinstance(model, nn.Module):
            getattr(chunked, f"unchunk_{section}")(model)


def _chunk_modules() -> list[Any]:
    """Return the modules of losses and of networks in chunks, or None where it is not imported yet."""
    return [sys.modules.get(f"{_CHUNKED_MODULES}{section}") for section in _CHUNKED]


def _gathered_alone(settings: ZeroConfig) -> set[str]:
    """Return the names of modules and classes that stage 3 gathers by themselves."""
    units = settings.units
    return {*units.tiles, *units.block_classes} if settings.stage == 3 else set()


def _is_staged(model: nn.Module) -> bool:
    # Without that module there is none of its models.
    staged = sys.modules.get("zero_ext.parallel.pipeline.hf_pipeline")
    return staged is not None and isinstance(model, staged.HfPipelineModule)


def _refused(text: str, section: str = "sparse_attention") -> ConfigError:
    return ConfigError(Problem(section, text))


def outermost_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """By path, the models of transformers that are in no other one."""
    if "transformers" not in sys.modules:  # a model of it cannot be there otherwise
        return {}
    from transformers import PreTrainedModel

    found: dict[str, PreTrainedModel] = {}
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            found[path] = module
            inside.update(module.modules())
    return found


def written_value(config: ZeroConfig, path: str) -> Any:
    """Return the value at a key path if the configuration sets one, else None."""
    found: Any = config
    for name in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(name)
        elif found is None or name not in found.model_fields_set:
            return None
        else:
            found = getattr(found, name)
    return found


def keys_set_elsewhere(config: ZeroConfig, reasons: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each key path of ``reasons`` that the configuration sets, although another library
    or the script does so: its text says which, and where."""
    found = {path: written_value(config, path) for path in reasons}
    return [
        Problem(path, f"got {show(value)}: {reasons[path]}. Remove the key.")
        for path, value in found.items()
        if value not in (None, False)
    ]
