"""The wheel: what is in it, what importing it costs, and that it leaves llama-index alone."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "celery", "redis", "langchain_core", "llama_index")


def run(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Run ``code`` in a fresh interpreter in ``cwd``, with ``path`` first on the import path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=120)
    return target


def test_wheel_content(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"ssd_integrations", "ssd_workers", "ssd_workflows"}
    for needed in (
        "ssd_integrations/py.typed",
        "ssd_integrations/langchain/chat_model.py",
        "ssd_integrations/llama_index/llm.py",
        "ssd_workers/engine/config.py",
    ):
        assert needed in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert "ssd = ssd_integrations.cli:main" in zipfile.ZipFile(wheel).read(entry_points).decode()


def test_llama_index_imports_from_the_repository_root() -> None:
    # llama-index depends on a top-level module `workflows`; a folder of ours must not hide it.
    code = (
        "import sys; sys.path.insert(0, '')\n"
        "import llama_index.core, workflows\n"
        "from ssd_integrations import SSDLLM\n"
        "assert workflows.__file__ is not None and 'site-packages' in workflows.__file__\n"
        "print(SSDLLM().metadata.model_name)"
    )
    assert run(code, cwd=ROOT) == "demo"


def test_adapters_import_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    code = (
        "import llama_index.core, ssd_integrations, ssd_workers, ssd_workflows\n"
        "from ssd_integrations import ChatSSD, SSDLLM\n"
        "assert ChatSSD().model == SSDLLM().model\n"
        "print(ssd_integrations.__file__, ssd_workers.__file__, ssd_workflows.__file__)"
    )
    for file in run(code, cwd=tmp_path, path=installed).split():
        assert Path(file).is_relative_to(installed)


def test_import_is_light(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import ssd_integrations\n"
        "print(time.perf_counter() - start)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    seconds = min(float(run(code, cwd=tmp_path, path=installed)) for _ in range(3))
    assert seconds < 0.3


@pytest.mark.parametrize(
    "module",
    [
        "ssd_integrations.protocol",
        "ssd_integrations.errors",
        "ssd_integrations.backends.base",
        "ssd_integrations.cli",
    ],
)
def test_light_modules_stay_light(module: str, tmp_path: Path) -> None:
    code = (
        f"import sys, {module}\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    run(code, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("ChatSSD", "langchain_core", "langchain"), ("SSDLLM", "llama_index", "llamaindex")],
)
def test_a_missing_extra_says_what_to_install(
    name: str, package: str, extra: str, tmp_path: Path
) -> None:
    code = f"""
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda n, *a: None if n.startswith({package!r}) else find_spec(n, *a)
import ssd_integrations
from ssd_integrations.errors import MissingExtraError
try:
    ssd_integrations.{name}
except MissingExtraError as error:
    print(error)
"""
    assert run(code, cwd=tmp_path) == (
        f"{name} needs packages that are not installed. "
        f"Run: pip install 'ssd-integrations[{extra}]'"
    )
