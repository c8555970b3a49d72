"""A model's int8 weights on disk, made once, so that a process is ready in seconds.

A folder holds two safetensors files: ``int8.safetensors`` (``<name>.weight`` int8 and
``<name>.scale``, read once and packed; the name is a linear layer's, or that of the weights of all
experts of a layer) and ``rest.safetensors`` (everything else in float32,
memory-mapped: the embedding's pages are shared by every process).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from ssd_integrations.errors import UnsupportedModelError
from ssd_workers.engine.attention import ATTENTION_NAME
from ssd_workers.engine.c_library import c_function
from ssd_workers.engine.experts import EXPERTS_NAME, expert_weights, is_experts, put_quantised
from ssd_workers.engine.int8 import Int8Fused, Int8Linear, PackedWeight, quantize_weight
from ssd_workers.engine.quiet import no_foreign_bars
from ssd_workers.engine.row_exact import make_activations_exact
from ssd_workers.engine.runner import ModelRunner
from ssd_workers.models.cache import (
    build_folder,
    disk_errors,
    entry_lock,
    int8_dir,
    publish,
    remove_tree,
    require_space,
)
from ssd_workers.models.store import ModelSource
from ssd_workers.progress import Progress

FORMAT = 1
_DONE = "complete.json"
_INT8 = "int8.safetensors"
_REST = "rest.safetensors"

# Threads that pack weights; each holds one unpacked weight.
_PACKERS = 2

# How much of a model may stay in float beside its embeddings: routers, and little else.
_SMALL_PART = 0.05

# Projections that read the same input and are therefore computed as one product.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def ensure_int8(source: ModelSource, progress: Progress) -> Path:
    """The folder with the int8 weights of ``source``; made if missing.

    Safe against two processes at once and against being killed in the middle.

    Raises:
      UnsupportedModelError: the model has weights that this cannot quantise row-exactly.
      DiskFullError: no space; nothing half-written is left.
    """
    folder = int8_dir(source.fingerprint)
    entry = f"int8-{source.fingerprint}"
    if not _is_complete(folder):
        with entry_lock(entry, progress):
            if not _is_complete(folder):
                with (
                    build_folder(entry) as scratch,
                    disk_errors("writing the int8 weights", folder),
                ):
                    _quantize_to(scratch, source, progress)
                    publish(scratch, folder)
                    _remove_superseded(folder, source)
    return folder


def _remove_superseded(current: Path, source: ModelSource) -> None:
    """Remove what earlier contents of the same folder left, and what came from a lost folder.

    A process that still maps such a file keeps it; the system frees it when the process ends.
    """
    for other in current.parent.iterdir():
        origin = _origin(other)
        if other == current or origin is None:
            continue
        if origin == source.path or not Path(origin).exists():
            remove_tree(other)


def load_int8(model_path: str, folder: Path, progress: Progress) -> PreTrainedModel:
    """The model with int8 linear layers, on the CPU, everything else in float32."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    # Without initialisation the float weights are address space that is never touched.
    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
        )
    with (
        safe_open(folder / _REST, framework="pt") as rest,
        safe_open(folder / _INT8, framework="pt") as packed,
    ):
        tensors = {key: rest.get_tensor(key) for key in rest.keys()}  # noqa: SIM118
        _replace_weights(model, packed, tensors, progress)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if missing or unexpected:
        raise UnsupportedModelError(
            f"The int8 weights in {folder} do not fit {type(model).__name__}: "
            f"missing {missing[:3]}, unexpected {unexpected[:3]}.",
            remedy="Remove the model with `ssd models rm`, or use --dtype float32.",
        )
    make_activations_exact(model)
    model.eval()
    _give_back_memory()
    return model


def _give_back_memory() -> None:
    """Return to the system what the unpacked weights took; the C library would keep it."""
    trim = c_function("malloc_trim")  # GNU's has it
    if trim is not None:
        trim(0)


def _is_complete(folder: Path) -> bool:
    return _record(folder).get("format") == FORMAT


def _origin(folder: Path) -> str | None:
    """The model folder that the int8 weights in ``folder`` were made from."""
    path = _record(folder).get("path")
    return path if isinstance(path, str) else None


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / _DONE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _quantize_to(folder: Path, source: ModelSource, progress: Progress) -> None:
    with no_foreign_bars():
        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
            trust_remote_code=False,
        ).eval()
    # Here, before anything is rounded, whatever differs from transformers is seen most clearly.
    runner = ModelRunner(model, torch.device("cpu"))
    runner.check_supported(source.name)
    runner.check_against_library(source.name)
    # One byte a weight, and four for the embeddings, which stay as they are.
    embeddings = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Embedding))
    require_space(model.num_parameters() + embeddings, f"int8 weights of {source.name!r}")
    weights = list(_weights(model))
    int8: dict[str, torch.Tensor] = {}
    for done, (name, weight) in enumerate(weights):
        int8[f"{name}.weight"], int8[f"{name}.scale"] = _quantized(weight)
        progress("quantise to int8", done + 1, len(weights), "layers")
    linears = {f"{key}.weight" for key, m in model.named_modules() if _is_linear(m)}
    quantised = linears.union(name for name, weight in weights if weight.ndim == 3)
    rest = {k: v.contiguous() for k, v in model.state_dict().items() if k not in quantised}
    _refuse_large_float_weights(model, rest, source.name)
    save_file(int8, folder / _INT8)
    save_file(rest, folder / _REST)
    (folder / _DONE).write_text(
        json.dumps({"format": FORMAT, "model": source.name, "path": source.path})
    )


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights to quantise: ``[out, in]`` of layers, ``[experts, out, in]`` of experts."""
    for key, module in model.named_modules():
        if _is_linear(module):
            yield key, module.weight if isinstance(module, nn.Linear) else module.weight.T
        elif is_experts(module):
            for name, weight in expert_weights(module):
                yield f"{key}.{name}", weight


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether ``module`` is a linear layer and nothing more, as a router built on one is."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = quantize_weight(weight.flatten(0, -2))
    return values.view(weight.shape), scale.view(weight.shape[:-1])


def _refuse_large_float_weights(
    model: PreTrainedModel, rest: dict[str, torch.Tensor], name: str
) -> None:
    """What stays in float is multiplied row-exactly too, but that is not what was asked for.

    Routers of experts are small, and better not rounded.
    """
    lookups = {
        f"{key}.weight" for key, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    odd = [key for key, tensor in rest.items() if tensor.ndim >= 2 and key not in lookups]
    if sum(rest[key].numel() for key in odd) > _SMALL_PART * model.num_parameters():
        largest = max(odd, key=lambda key: rest[key].numel())
        raise UnsupportedModelError(
            f"Model {name!r} multiplies by weights that int8 does not cover, such as {largest!r}.",
            remedy="Use --dtype float32.",
        )


def _replace_weights(
    model: PreTrainedModel, packed: Any, rest: dict[str, torch.Tensor], progress: Progress
) -> None:
    names = [key.removesuffix(".scale") for key in packed.keys() if key.endswith(".scale")]  # noqa: SIM118
    experts = {name for name in names if packed.get_slice(f"{name}.scale").get_shape()[1:]}
    groups = _fusion_groups([name for name in names if name not in experts])
    total = len(groups) + len(experts)

    def modules(group: list[str]) -> list[nn.Module]:
        weights = [packed.get_tensor(f"{name}.weight") for name in group]
        scales = [packed.get_tensor(f"{name}.scale") for name in group]
        biases = [rest.pop(f"{name}.bias", None) for name in group]
        bias = _joined_bias(biases, [len(scale) for scale in scales])
        if len(group) == 1:
            return [Int8Linear(PackedWeight(weights[0], scales[0]), bias)]
        weight = PackedWeight(torch.cat(weights), torch.cat(scales))
        return Int8Fused(weight, bias, [len(scale) for scale in scales]).members()

    def products(name: str) -> list[Int8Linear]:
        weights = packed.get_tensor(f"{name}.weight")
        scales = packed.get_tensor(f"{name}.scale")
        bias = rest.pop(f"{name}_bias", None)
        return [
            Int8Linear(PackedWeight(weight, scale), None if bias is None else bias[i])
            for i, (weight, scale) in enumerate(zip(weights, scales, strict=True))
        ]

    # Half of the time is the system's, handing out memory page by page to one thread at a time.
    with ThreadPoolExecutor(_PACKERS) as pool:
        for done, (group, made) in enumerate(zip(groups, pool.map(modules, groups), strict=True)):
            for name, module in zip(group, made, strict=True):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, module)
            progress("pack int8 weights", done + 1, total, "layers")
        of_modules: dict[str, dict[str, list[Int8Linear]]] = {}
        order = sorted(experts)
        for done, (name, linears) in enumerate(zip(order, pool.map(products, order), strict=True)):
            parent, _, attribute = name.rpartition(".")
            of_modules.setdefault(parent, {})[attribute] = linears
            progress("pack int8 weights", len(groups) + done + 1, total, "layers")
    for parent, weights in of_modules.items():
        put_quantised(model.get_submodule(parent), weights)


def _joined_bias(biases: list[torch.Tensor | None], sizes: list[int]) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    # Adding a zero where one of the fused layers has no bias leaves its values as they are.
    parts = [torch.zeros(n) if b is None else b for b, n in zip(biases, sizes, strict=True)]
    return torch.cat(parts)


def _fusion_groups(names: list[str]) -> list[list[str]]:
    """``names`` in order, with siblings that share their input in one group."""
    left = dict.fromkeys(names)
    groups = []
    while left:
        name = next(iter(left))
        parent, _, last = name.rpartition(".")
        group = [name]
        for family in _FUSED:
            siblings = [f"{parent}.{member}" for member in family]
            if last in family and all(sibling in left for sibling in siblings):
                group = siblings
        for member in group:
            del left[member]
        groups.append(group)
    return groups
