"""`ssd demo` with the demo model, from the first step to the table."""

from __future__ import annotations

import json
import os

import pytest

from tests.conftest import RunSSD


@pytest.mark.slow
@pytest.mark.demo_model
@pytest.mark.timeout(1200)
def test_the_demo_runs_and_speculation_keeps_the_text(run_ssd: RunSSD) -> None:
    result = run_ssd(
        "demo", "--quick", "--json", env={"OMP_NUM_THREADS": str(os.cpu_count())}, timeout=1100
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert len(report["support_reply"]) > 100
    assert report["llama_index"]
    assert [section["name"] for section in report["sections"]] == [
        "Bicycles",
        "Accessories",
        "Spare parts",
    ]
    assert all(len(section["text"]) > 100 for section in report["sections"])
    comparison = report["comparison"]
    assert comparison["identical_texts"] is True
    assert comparison["tokens_compared"] > 0
    rows = {row["decoder"]: row for row in comparison["rows"]}
    speculative = rows["ours, speculative"]
    assert speculative["acceptance_length"] > 1.2
    assert speculative["tokens_per_second"] > rows["ours, autoregressive"]["tokens_per_second"]
