"""The process that turns a GGUF file into a folder of float32 safetensors.

A process of its own, for three reasons: transformers' own bars and warnings stay out of the user's
terminal without touching the settings of the program that asked; the gigabytes it needs are
returned to the system in full; and where memory runs out, the kernel ends this process rather
than the caller.

Run as ``python -m ssd_workers.models.convert_child FILE FOLDER``; standard input is a pipe that
the parent keeps open. One JSON object a line on standard output: ``{"stage", "done", "total",
"unit"}`` while it works, then ``{"ok": {...}}`` or ``{"error": {"code", "message"}}``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

# What chat formats use to end a turn or a text. A GGUF file names one end token, yet a model may
# end with any of those in its vocabulary, as its original generation_config.json would say.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<turn|>",
    "<eos>",
    "</s>",
    "<|END_OF_TURN_TOKEN|>",
)
_SHARD = "2GB"


class _Reporter:
    """Writes the protocol's lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._furthest = 0

    def stage(self, stage: str, done: int, total: int, unit: str) -> None:
        self._send({"stage": stage, "done": done, "total": total, "unit": unit})

    def tensors(self, done: int, total: int) -> None:
        # Two bars of transformers cover the same tensors, one after the other; never step back.
        if done > self._furthest:
            self._furthest = done
            self.stage("convert", done, total, "tensors")

    def ok(self, result: dict[str, Any]) -> None:
        self._send({"ok": result})

    def error(self, code: str, message: str) -> None:
        self._send({"error": {"code": code, "message": message}})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def main(gguf_file: str, target: str) -> int:
    """Convert, reporting on standard output; the exit status is 0 on success."""
    # Libraries print to standard output as they like; the protocol keeps a copy to itself.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = _Reporter(out)
    try:
        report.ok(_convert(Path(gguf_file), Path(target), report))
        return 0
    except MemoryError as error:
        report.error("model_load_failed", f"not enough memory: {error}")
    except Exception as error:
        # The process boundary: every failure becomes a line that the parent turns into an error.
        if _is_disk_full(error):
            report.error("disk_full", str(error))
        elif isinstance(error, ValueError) and "not supported" in str(error):
            report.error("unsupported_model", str(error))
        else:
            report.error("model_load_failed", f"{type(error).__name__}: {error}")
            raise
    return 1


def _end_with_parent() -> None:
    """Die when the parent does: its end of the pipe closes, however it ended."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(3)


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # safetensors reports the operating system's error as text only.
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def _convert(gguf_file: Path, target: Path, report: _Reporter) -> dict[str, Any]:
    report.stage("read tokenizer", 0, 0, "")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    # Linked into a folder of its own, so that no file beside it is taken for a part of the model.
    link = target / "source.gguf"
    link.symlink_to(gguf_file)
    where = {"pretrained_model_name_or_path": target, "gguf_file": link.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    report.stage("read tokenizer", 1, 1, "")
    _watch_tensors(report)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    link.unlink()
    ends = end_token_ids(tokenizer, model.config.eos_token_id)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=ends,
        pad_token_id=model.config.pad_token_id,
    )
    report.stage("save", 0, 0, "B")
    model.save_pretrained(target, max_shard_size=_SHARD)
    tokenizer.save_pretrained(target)
    return {"eos_token_ids": ends}


def end_token_ids(tokenizer: Any, configured: int | list[int] | None) -> list[int]:
    """Every token that ends a generation: the configured ones first, then the known ones."""
    first = configured if isinstance(configured, list) else [configured]
    vocabulary = tokenizer.get_vocab()
    special = {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    } | set(tokenizer.all_special_ids)
    known = [vocabulary[text] for text in END_TOKENS if vocabulary.get(text) in special]
    return list(dict.fromkeys(i for i in [*first, tokenizer.eos_token_id, *known] if i is not None))


class _Bar:
    """Stands in for transformers' progress bars and reports instead of drawing."""

    report: _Reporter

    def __init__(self, iterable: Iterable[Any] = (), *_: Any, **options: Any) -> None:
        self._items = iterable
        self._counts = "tensors" in str(options.get("desc")) or "weights" in str(
            options.get("desc")
        )
        total = options.get("total")
        self._total = total if total is not None else len(list(iterable))

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._items, 1):
            yield item
            if self._counts:
                self.report.tensors(done, self._total)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, _: float = 1) -> None:
        pass

    def set_postfix(self, *_: Any, **__: Any) -> None:
        pass

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


def _watch_tensors(report: _Reporter) -> None:
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    _Bar.report = report
    logging.set_tqdm_hook(lambda _, args, options: _Bar(*args, **options))
    # The loader of most architectures uses a bar of its own that the hook does not see.
    modeling_gguf_pytorch_utils.tqdm = _Bar


if __name__ == "__main__":
    status = main(sys.argv[1], sys.argv[2])
    # Skip the interpreter's slow teardown of gigabytes; everything is written by now.
    sys.stderr.flush()
    os._exit(status)
