"""`python -m ssd_integrations.cli`: the `ssd` command where its script is not on the path."""

from __future__ import annotations

from ssd_integrations.cli import main

main()
