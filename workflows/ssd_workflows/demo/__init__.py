"""`ssd demo`: the main job from end to end, on one machine, with nothing to set up."""

from __future__ import annotations

from ssd_integrations.workflows import Workflow

workflow = Workflow(
    name="demo",
    summary="Chain, queue and report on an embedded worker, measured against transformers.",
    app="ssd_workflows.demo.command:demo",
)
