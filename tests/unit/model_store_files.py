"""What the tests of the model store are fed: a tiny GGUF model, wheels that carry it, a log."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ssd_workers.models.packages import PackageSet
from tests.tiny import CHAT_TEMPLATE, make_tokenizer

# GGUF token types: ordinary text and control tokens.
_NORMAL, _CONTROL = 1, 3


def make_tiny_gguf(path: Path, *, seed: int = 0, arch: str = "qwen2") -> Qwen2ForCausalLM:
    """Write a random two-layer model in float32 with a real tokenizer; gives the same model."""
    core = make_tokenizer()
    vocabulary = sorted(core.get_vocab().items(), key=lambda item: item[1])
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([token for token, _ in vocabulary])
    special = set(core.all_special_tokens) | {"<|im_start|>"}
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token, _ in vocabulary])
    merges = json.loads(core.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    # The file names one end token, as real ones do; the chat format has another.
    writer.add_eos_token_id(core.convert_tokens_to_ids("<|im_end|>"))
    writer.add_pad_token_id(core.convert_tokens_to_ids("<|endoftext|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        kind = name.rsplit(".", 1)[1]
        stored = names.get_name(name.removesuffix(f".{kind}"))
        writer.add_tensor(f"{stored}.{kind}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def make_wheels(data: bytes, folder: Path, *, parts: int = 3, name: str = "demo") -> PackageSet:
    """Real wheels in ``folder`` that carry ``data`` in ``parts`` parts, and their package set."""
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(data) // parts)
    packages = tuple(f"tiny-store-part{number}" for number in range(1, parts + 1))
    for number, package in enumerate(packages):
        write_wheel(folder, package, data[number * step : (number + 1) * step])
    return PackageSet(
        name=name,
        title="a tiny model",
        packages=packages,
        version="1.0",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        download_bytes=len(data),
        converted_bytes=len(data),
        eos_token_ids=(0, 2),
    )


def write_wheel(folder: Path, package: str, data: bytes) -> Path:
    """A wheel of version 1.0 that pip accepts, with ``data`` in its ``data/part.bin``."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    files = {
        f"{module}/__init__.py": b"raise SystemExit('never to be imported')\n",
        f"{module}/data/part.bin": data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        archive.writestr(f"{info}/RECORD", record)
    return wheel


class Log:
    """A progress callback that keeps what it is told."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, float, float, str]] = []

    def __call__(self, stage: str, done: float, total: float, unit: str) -> None:
        self.reports.append((stage, done, total, unit))

    @property
    def stages(self) -> list[str]:
        """The stages in the order of their first report."""
        return list(dict.fromkeys(report[0] for report in self.reports))


_PREPARE = """
import json, sys
from pathlib import Path
from ssd_workers.models.demo import ensure_demo
from ssd_workers.models.packages import PackageSet
values = json.loads(sys.argv[1])
packages = PackageSet(**{**values, "packages": tuple(values["packages"]),
                         "eos_token_ids": tuple(values["eos_token_ids"])})
def progress(stage, done, total, unit):
    print(stage, flush=True)
from_dir = Path(sys.argv[2]) if sys.argv[2] else None
manifest = ensure_demo(progress=progress, packages=packages, from_dir=from_dir)
print("ready", manifest.fingerprint, flush=True)
"""


def start_preparing(
    packages: PackageSet, from_dir: Path | None, cache: Path, **env: str
) -> subprocess.Popen[str]:
    """A process that prepares ``packages`` in ``cache``; prints a line per report, then ready."""
    values = {name: getattr(packages, name) for name in packages.__dataclass_fields__}
    return subprocess.Popen(
        [sys.executable, "-c", _PREPARE, json.dumps(values), str(from_dir or "")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SSD_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **env},
    )
