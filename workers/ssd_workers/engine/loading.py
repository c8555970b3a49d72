"""From a model name to something that decodes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from ssd_integrations.errors import (
    InvalidRequestError,
    ModelLoadError,
    SSDError,
    UnsupportedModelError,
)
from ssd_integrations.protocol import ModelInfo
from ssd_workers.engine import int8, int8_cache
from ssd_workers.engine.attention import ATTENTION_NAME
from ssd_workers.engine.config import AttnImplementation, DecodeStep, DType, EngineConfig
from ssd_workers.engine.experts import EXPERTS_NAME
from ssd_workers.engine.fixed_runner import check_decode_step, make_runner
from ssd_workers.engine.model_config import context_length, eos_token_ids, load_config
from ssd_workers.engine.placement import DeviceMap, Placement, missing_package
from ssd_workers.engine.quiet import no_foreign_bars
from ssd_workers.engine.rollback import OWN_ATTENTION
from ssd_workers.engine.runner import ModelRunner
from ssd_workers.engine.vocabulary import check_same_tokenizer, load_tokenizer
from ssd_workers.models.store import ModelSource, resolve_model
from ssd_workers.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode, with the facts that the engine needs."""

    name: str
    architecture: str
    fingerprint: str
    runner: ModelRunner
    tokenizer: Any
    dtype: str
    device: torch.device
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]

    def info(
        self, *, context_length: int, draft_model: str | None, has_chat_template: bool
    ) -> ModelInfo:
        """What clients are told of it, as one engine serves it."""
        return ModelInfo(
            name=self.name,
            architecture=self.architecture,
            context_length=context_length,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            device=str(self.device),
            draft_model=draft_model,
            has_chat_template=has_chat_template,
        )


def load_engine_models(
    config: EngineConfig, progress: Progress
) -> tuple[LoadedModel, LoadedModel | None]:
    """The target and, if ``config`` names one, the draft model.

    Both names and both tokenizers are checked before any weights are read.

    Raises:
      DraftModelMismatchError: the draft's tokenizer is not the target's.
      SSDError: as :func:`load_model`.
    """
    target_source = resolve_model(config.model, progress=progress)
    draft_source = None
    if config.draft_model is not None:
        draft_source = resolve_model(config.draft_model, progress=progress)
        check_same_tokenizer(target_source, draft_source)
    target = load_model(
        target_source,
        config.dtype,
        config.device,
        progress,
        attention=config.attn_implementation,
        decode_step=config.decode_step,
        max_num_seqs=config.max_num_seqs,
        device_map=config.device_map_for_loading(),
        quantization=config.quantization_for_loading(),
    )
    if draft_source is None:
        return target, None
    # The draft runs at the target's precision: cheaper than float32 and never part of the text.
    dtype = cast(DType, target.dtype)
    draft = load_model(
        draft_source,
        dtype,
        str(target.device),
        progress,
        attention=config.attn_implementation,
        decode_step=config.decode_step,
        max_num_seqs=config.max_num_seqs,
    )
    return target, draft


def load_model(
    source: ModelSource,
    dtype: DType,
    device: str,
    progress: Progress,
    *,
    attention: AttnImplementation = "packed",
    decode_step: DecodeStep = "eager",
    max_num_seqs: int = 8,
    device_map: DeviceMap | None = None,
    quantization: dict[str, Any] | None = None,
) -> LoadedModel:
    """Load ``source`` for decoding.

    Parameters:
      source: the model.
      dtype: precision of what is computed; ``quantization`` may store weights in fewer bits.
      device: where the model goes; with a ``device_map``, where token ids go in is found out.
      progress: told how far it is.
      attention: how rows attend to their keys.
      decode_step: how decoding steps are run.
      max_num_seqs: sequences that steps of fixed shapes are prepared for.
      device_map: as transformers takes it, to spread the model over devices.
      quantization: fields of transformers' ``quantization_config``.

    Raises:
      UnsupportedModelError: an architecture whose state cannot be rolled back, or that this engine
        does not compute as transformers does.
      InvalidRequestError: a dtype, device or quantization that this machine does not have, or a
        ``decode_step`` that does not go with them.
      MissingExtraError: the quantization needs a package that is not installed.
      ModelLoadError: files are damaged or missing.
    """
    chosen_device = _choose_device(device)
    config = load_config(source)
    if isinstance(device_map, dict):
        for place in dict.fromkeys(device_map.values()):
            _choose_device(f"cuda:{place}" if isinstance(place, int) else place)
    placement = Placement(chosen_device, device_map, quantization)
    chosen_dtype = _choose_dtype(dtype, placement, source)
    check_decode_step(decode_step, placement, chosen_dtype)
    tokenizer = load_tokenizer(source)
    progress("load model", 0, 1, "models")
    try:
        model = _load_weights(source, chosen_dtype, placement, progress)
    except SSDError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"Model {source.name!r} does not fit the memory of {chosen_device}: {error}",
            remedy="Use a smaller dtype, quantization=, device_map='auto', or a smaller model.",
        ) from error
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        if error.args == (ATTENTION_NAME,):  # a class of attention for each name
            raise UnsupportedModelError(
                f"Model {source.name!r} ({config.model_type}) cannot be decoded by this engine: "
                f"{OWN_ATTENTION}."
            ) from error
        raise ModelLoadError(f"Model {source.name!r} cannot be loaded: {error}") from error
    progress("load model", 1, 1, "models")
    text_config = config.get_text_config(decoder=True)
    if device_map is not None:
        chosen_device = model.get_input_embeddings().weight.device
    runner = make_runner(model, chosen_device, attention, decode_step, max_num_seqs, chosen_dtype)
    runner.check_supported(source.name)
    runner.check_against_library(source.name)
    if chosen_dtype == "int8":
        runner.fuse_layers(context_length(text_config))
    if decode_step == "graphs":  # a compilation takes too long to do what may not be needed
        runner.warm_up()
    return LoadedModel(
        name=source.name,
        architecture=type(model).__name__,
        fingerprint=source.fingerprint,
        runner=runner,
        tokenizer=tokenizer,
        dtype=chosen_dtype,
        device=chosen_device,
        vocab_size=text_config.vocab_size,
        context_length=context_length(text_config),
        eos_token_ids=eos_token_ids(source, text_config, tokenizer),
    )


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidRequestError(
            f"Device {device!r} cannot be used here: {str(error).splitlines()[0]}",
            remedy="Use --device cpu, or run `ssd doctor` to see which devices there are.",
        ) from error
    return chosen


def _choose_dtype(dtype: DType, placement: Placement, source: ModelSource) -> str:
    device = placement.device
    if dtype == "auto":
        if device.type != "cpu":
            return "bfloat16"
        # Only the demo model is quantised unasked: changing the precision of somebody's own model
        # changes its words, and that is theirs to decide.
        dtype = "int8" if source.name == "demo" and placement.is_plain else "float32"
    if dtype == "int8":
        if device.type != "cpu":
            raise InvalidRequestError(
                f"dtype 'int8' runs on a CPU only, not on device {device.type!r}.",
                remedy="Use --dtype bfloat16 there, or --device cpu.",
            )
        if not int8.cpu_is_exact():
            logger.warning(
                "This processor has no exact int8 products (VNNI or AMX); "
                "decoding in float32 instead, which is slower."
            )
            return "float32"
    return dtype


def _load_weights(
    source: ModelSource, dtype: str, placement: Placement, progress: Progress
) -> PreTrainedModel:
    if dtype == "int8":
        folder = int8_cache.ensure_int8(source, progress)
        return int8_cache.load_int8(source.path, folder, progress)
    arguments = placement.loading_arguments()
    if placement.is_plain and placement.device.type == "cpu":
        arguments["experts_implementation"] = EXPERTS_NAME
    try:
        with no_foreign_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                source.path,
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION_NAME,
                trust_remote_code=False,
                **arguments,
            )
    except ImportError as error:
        if placement.quantization is None:
            raise
        raise missing_package(placement.quantization, error) from error
    # Quantised and spread weights are where they belong, and some cannot be moved.
    placed = model.to(placement.device) if placement.is_plain else model  # type: ignore[arg-type]
    return placed.eval()
