"""Python and the optional extras: what is installed, and in which version."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from ssd_integrations.cli.checks import Check

_DISTRIBUTION = "ssd-integrations"
_EXTRAS = {
    "langchain": "ChatSSD",
    "llamaindex": "SSDLLM",
    "celery": "requests through a broker",
    "worker": "the engine in this process, workers and the embedded broker",
}
_REQUIREMENT = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?(?P<spec>[^;)]*)\)?")
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")


def checks() -> Iterator[Check]:
    """Python, the package itself, every extra, and whether any engine can be reached."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", "ok", f"{version} ({sys.executable})")
    yield Check(_DISTRIBUTION, "ok", metadata.version(_DISTRIBUTION))
    missing: dict[str, list[str]] = {}
    for extra, what in _EXTRAS.items():
        check, lacking = _extra(extra, what)
        missing[extra] = lacking
        yield check
    if missing["worker"] and missing["celery"]:
        yield Check(
            "engine",
            "fail",
            "neither an engine in this process nor a way to workers is installed",
            f"pip install '{_DISTRIBUTION}[worker]' (engine here) or "
            f"'{_DISTRIBUTION}[celery]' (workers elsewhere)",
        )


def requirements(extra: str) -> dict[str, str]:
    """Package name -> version specifier, as the installed metadata lists them for ``extra``."""
    found = {}
    for line in metadata.requires(_DISTRIBUTION) or []:
        wanted, parsed = _EXTRA.search(line), _REQUIREMENT.match(line)
        if wanted and parsed and wanted["extra"] == extra and parsed["name"] != _DISTRIBUTION:
            found[parsed["name"]] = parsed["spec"].strip()
    return found


def _extra(extra: str, what: str) -> tuple[Check, list[str]]:
    present, lacking, wrong = [], [], []
    for name, spec in requirements(extra).items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
            continue
        present.append(f"{name} {version}")
        if not _satisfies(version, spec):
            wrong.append(f"{name} {version} (needs {spec})")
    name = f"extra [{extra}]"
    install = f"pip install '{_DISTRIBUTION}[{extra}]'"
    if lacking:
        detail = f"{what}: missing {', '.join(lacking)}"
        return Check(name, "warn", detail, f"If you need it: {install}"), lacking
    if wrong:
        return Check(name, "fail", f"{what}: {', '.join(wrong)}", install), lacking
    return Check(name, "ok", f"{what}: {', '.join(present)}"), lacking


def _satisfies(version: str, spec: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        # Only a bare install lacks `packaging`; every extra brings it.
        return True
    return SpecifierSet(spec).contains(version, prereleases=True)
