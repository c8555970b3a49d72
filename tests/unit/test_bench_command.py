"""`ssd bench` in a process of its own, on tiny models: the report, the chart, early refusals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunSSD, ssd_environment

FIELDS = {
    "tokens_per_second", "tokens_per_second_iqr", "speedup", "speedup_iqr", "speedup_over_ar",
    "mean_acceptance_length", "time_to_first_token_s", "time_to_first_token_s_iqr", "end_to_end_s",
    "end_to_end_s_iqr", "end_to_end_tokens_per_second", "cpu_seconds_per_1000_tokens",
    "gpu_seconds_per_1000_tokens", "tokens", "answers", "failures", "errors", "categories",
    "concurrent",
}  # fmt: skip


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversations, one of them with two turns."""
    prompts = {
        "a": ["Please restart the router, then restart it again."],
        "b": ["Revenue rose in the north.", "And in the south?"],
        "c": ["안녕하세요, 라우터를 다시 시작해 주세요."],
    }
    file = tmp_path_factory.mktemp("suite") / "tiny.jsonl"
    _write(file, prompts)
    return file


def _write(file: Path, prompts: dict[str, list[str]]) -> None:
    lines = []
    for name, turns in prompts.items():
        messages = [{"role": "user", "content": turn} for turn in turns]
        fields = {"id": name, "category": f"kind-{name}", "language": "en", "max_tokens": 16}
        lines.append(json.dumps({**fields, "messages": messages}))
    file.write_text("\n".join(lines), encoding="utf-8")


def test_the_whole_command(
    run_ssd: RunSSD, suite: Path, tiny_model: Path, draft_model: Path, tmp_path: Path
) -> None:
    json_file, chart = tmp_path / "report.json", tmp_path / "speed.png"
    ours = ["ar", "ngram", "suffix", "model", "hybrid", "auto"]
    libraries = ["transformers", "transformers-prompt-lookup", "transformers-assisted"]
    modes = ",".join(libraries + ours)
    done = run_ssd(
        "bench", "--suite", str(suite), "--model", str(tiny_model), "--draft-model",
        str(draft_model), "--modes", modes, "--rounds", "2", "--max-tokens", "12",
        "--concurrency", "2", "--json", str(json_file), "--chart", str(chart), timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(json_file.read_text(encoding="utf-8"))
    assert list(report["modes"]) == modes.split(",")
    for name, mode in report["modes"].items():
        assert set(mode) == FIELDS, name
        assert mode["failures"] == 0
        assert mode["answers"] == 8
        assert mode["tokens_per_second"] > 0
        assert mode["cpu_seconds_per_1000_tokens"] > 0
        assert 0 < mode["time_to_first_token_s"] <= mode["end_to_end_s"]
        assert set(mode["categories"]) == {"kind-a", "kind-b", "kind-c"}
        assert (mode["concurrent"] is not None) == (name in ours)
    # One model in float32 on every side: the same answers, so the same number of tokens.
    assert len({mode["tokens"] for mode in report["modes"].values()}) == 1
    assert report["modes"]["transformers"]["speedup"] == 1.0
    assert report["modes"]["ar"]["mean_acceptance_length"] == 1.0
    assert report["modes"]["ar"]["concurrent"]["requests"] == 2
    assert report["reference"] == "transformers"
    assert report["factors"]["best_drafter"] in ours[1:]
    assert report["factors"]["quantisation"] is None
    texts = report["identical_texts"]
    assert texts["modes"] == ours
    assert texts["different"] == 0
    # Six modes, two rounds, alone and in batches, three conversations; the first is the measure.
    assert texts["conversations_compared"] == 6 * 2 * 2 * 3 - 3
    facts = report["conditions"]
    assert facts["model"] == str(tiny_model)
    assert facts["dtype"] == "float32"
    assert facts["threads"] == 1
    assert facts["rounds"] == 2
    assert facts["machine"]["cores"] >= 1
    assert facts["versions"]["transformers"]
    assert facts["command"].startswith("ssd bench --suite")
    assert chart.read_bytes().startswith(b"\x89PNG")
    for column in ("tokens/s", "speed-up", "first token", "CPU s/1000", "failed"):
        assert column in done.stdout
    assert "all identical" in done.stdout
    assert "Speculation:" in done.stdout
    assert "90 of 90 answers" in done.stderr


def test_failed_answers_are_counted_and_the_command_fails(
    run_ssd: RunSSD, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "long.jsonl"
    _write(file, {"fits": ["Hello."], "too-long": ["router " * 800]})
    done = run_ssd(
        "bench", "--suite", str(file), "--model", str(tiny_model), "--modes", "ar,ngram",
        "--json", "-",
    )  # fmt: skip
    assert done.returncode == 1
    report = json.loads(done.stdout)
    for mode in report["modes"].values():
        assert (mode["failures"], mode["answers"]) == (1, 1)
        assert "the context of model" in mode["errors"][0]
    assert "failed" in done.stderr


def test_quantisation_is_reported_apart(run_ssd: RunSSD, suite: Path, tiny_model: Path) -> None:
    done = run_ssd(
        "bench", "--suite", str(suite), "--model", str(tiny_model), "--dtype", "int8", "--modes",
        "ar-float32,ar,ngram", "--quality", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["reference"] == "ar"
    assert report["conditions"]["dtype"] == "int8"
    assert report["factors"]["quantisation"] > 0
    assert report["factors"]["speculation"] > 0
    assert report["identical_texts"]["modes"] == ["ar", "ngram"]
    quality = report["quality"]
    assert quality["dtype"] == "int8"
    assert set(quality["languages"]) == {"en", "de", "es", "ko"}
    # A random model has no idea of the text, and quantising it changes little.
    assert quality["perplexity_float32"] > 100
    assert quality["perplexity_ratio"] == pytest.approx(1.0, abs=0.1)
    assert 0.8 < quality["greedy_agreement"] <= 1.0
    assert "the same first choice at" in done.stderr


def test_llama_cpp_runs_the_same_file(run_ssd: RunSSD, suite: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.unit.model_store_files import make_tiny_gguf

    gguf = tmp_path / "tiny.gguf"
    make_tiny_gguf(gguf)
    done = run_ssd(
        "bench", "--suite", str(suite), "--model", str(gguf), "--max-tokens", "8", "--modes",
        "transformers,llama-cpp,llama-cpp-lookup,ar", "--json", "-",
        env={"SSD_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for name in ("llama-cpp", "llama-cpp-lookup"):
        assert report["modes"][name]["answers"] == 4
        assert report["modes"][name]["tokens"] == report["modes"]["transformers"]["tokens"]
        assert report["modes"][name]["tokens_per_second"] > 0
    assert report["conditions"]["gguf"] == "tiny.gguf"
    assert report["conditions"]["llama_cpp_build"].startswith("CPU")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--modes", "ngarm"], 2, "There is no mode 'ngarm'. Did you mean 'ngram'?"),
        (["--modes", ","], 2, "No modes are given."),
        (["--modes", "ar,ar"], 2, "The mode 'ar' is given twice."),
        (["--modes", "ar,model"], 2, "The mode 'model' needs a draft model."),
        (["--modes", "transformers-assisted"], 2, "needs a draft model."),
        (["--suite", "general-knowledge"], 2, "There is no suite 'general-knowledge'."),
        (["--dtype", "int3"], 2, "dtype='int3'"),
        (["--modes", "transformers", "--concurrency", "4"], 2, "--concurrency 4 needs a mode"),
        (["--chart", "speed.svg"], 2, "the chart is a PNG file"),
        (["--chart", "no/such/folder/speed.png"], 2, "there is no folder"),
        (["--json", "no/such/folder/report.json"], 2, "there is no folder"),
        (["--json", "/"], 2, "this is a folder"),
        (["--quality", "--dtype", "float32"], 2, "--quality compares a dtype with float32"),
        (["--model", "no/such/model.gguf"], 1, "There is no file or folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(
    args: list[str], code: int, message: str, run_ssd: RunSSD, tmp_path: Path
) -> None:
    done = run_ssd("bench", *args, env={"SSD_CACHE_DIR": str(tmp_path)})
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "What to do:" in done.stderr
    assert "load model" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "args"),
    [
        ("xllamacpp", ["--modes", "llama-cpp"]),
        ("xllamacpp", ["--modes", "ar,llama-cpp-lookup"]),
        ("matplotlib", ["--modes", "ar", "--chart", "speed.png"]),
    ],
)
def test_a_missing_package_names_its_extra(package: str, args: list[str]) -> None:
    code = f"""
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda n, *a: None if n == {package!r} else find_spec(n, *a)
from ssd_integrations.cli import main
sys.argv = ["ssd", "bench", *{args!r}]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ssd_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'ssd-integrations[bench]'" in done.stderr
    assert "load model" not in done.stderr


def test_modes_that_need_more_memory_than_there_is_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    from ssd_integrations.errors import InvalidRequestError
    from ssd_workers.bench.modes import parse_modes
    from ssd_workers.bench.setup import Options, open_bench

    class Little:
        available = 900_000_000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    modes: Any = tuple(parse_modes("transformers,ar", draft_model=None))
    with (
        pytest.raises(InvalidRequestError, match=r"1\.0 GB of memory together.*0\.9 GB are"),
        open_bench(Options(model=str(tiny_model), modes=modes)),
    ):
        pass


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the tiny model's tokenizer."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "draft", seed=5)


def test_modes_that_remember_do_not_help_each_other(tiny_model: Path) -> None:
    """A suffix drafter that knew the answer would draft all of it."""
    from ssd_workers.bench.modes import parse_modes
    from ssd_workers.bench.setup import Options, open_bench

    modes = tuple(parse_modes("suffix,hybrid", draft_model=None))
    messages = [{"role": "user", "content": "Please restart the router."}]
    with open_bench(Options(model=str(tiny_model), modes=modes)) as bench:
        suffix, hybrid = bench.decoders
        cold = suffix.answer(messages, 60)
        warm = suffix.answer(messages, 60)
        assert warm.text == cold.text
        assert warm.steps < cold.steps
        other = hybrid.answer(messages, 60)
        assert other.text == cold.text
        assert other.steps > warm.steps
        suffix.start_round()
        assert suffix.answer(messages, 60).steps == cold.steps


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ended_early_reports_what_it_has(
    suite: Path, tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM too: a job in the background cannot be sent Ctrl-C."""
    report = tmp_path / "report.json"
    process = subprocess.Popen(
        [
            sys.executable, "-c", "from ssd_integrations.cli import main; main()", "bench",
            "--suite", str(suite), "--model", str(tiny_model), "--modes", "ar",
            "--rounds", "1000", "--json", str(report),
        ],
        env=ssd_environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if " answers" in line and not line.startswith("0 "):
            break
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["interrupted"]
    assert found["modes"]["ar"]["answers"] > 0
