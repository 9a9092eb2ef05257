"""Push a trained model to the Hugging Face Hub, with a card that describes how it was trained."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from cavesson.command_line import is_trained_here
from cavesson.errors import UserError, first_line
from cavesson.importers.traits import traits_of
from cavesson.notebook import SHOWN
from cavesson.record import open as open_run
from cavesson.record.read.reader import Run
from cavesson.record.storage import storage

_FAILED_UPLOADS = ("LFS batch API returned errors", "Error while uploading")
"""How the library's errors begin that have no type of their own: of large files, where hf_xet is off or missing."""


class Push(NamedTuple):
    """The content to push: files of the model by their names in the repository, and the text of README.md."""

    files: dict[str, Path]
    card: str


def prepare(folder: Path, repo: str, allow_remote: bool = False) -> Push:
    """Return the files and the card to push to a repository, OWNER/NAME, for the model of a finished run.

    With ``allow_remote``, the record may be at another place that the run's folder names.

    Raises:
        UserError: ``folder`` is not a run, has no trained model yet, was trained by another program, or a link in it
            leads out of it.
    """
    run, model = open_run(folder, allow_remote), folder / "model"
    if not model.is_dir():
        raise UserError(f"{folder} has no trained model: give the folder of a run that has finished")
    if not is_trained_here(run.info):
        raise UserError(
            f"{folder} was not trained by Cavesson, so there is nothing to write a card from; push the model with: "
            f"hf upload {repo} {model}"
        )
    files = storage(folder)
    names = (path.relative_to(folder).as_posix() for path in sorted(model.rglob("*")) if path.name != "README.md")
    paths = {name.removeprefix("model/"): Path(files.path(name)) for name in names if files.exists(name)}
    return Push(paths, card(run, repo))


def push(what: Push, repo: str, private: bool) -> str:
    """Create the repository if it does not exist, push everything in one commit and return the commit's URL.

    Raises:
        UserError: The name is invalid, the Hub rejects the push, or the Hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    operations = [CommitOperationAdd(name, path) for name, path in what.files.items()]
    operations.append(CommitOperationAdd("README.md", what.card.encode()))
    hub = HfApi()
    with _explained(repo):
        hub.create_repo(repo, private=private, exist_ok=True)
        return str(hub.create_commit(repo, operations, commit_message="Trained with Cavesson").commit_url)


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Convert known errors of the Hub and its libraries into one-line messages."""
    from huggingface_hub.constants import ENDPOINT

    # HTTPError belongs to the HTTP library in use: httpx2, in earlier versions httpx.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except HFValidationError as error:
        raise UserError(f"{repo!r} cannot be a name on the Hub: {_line(error)}") from error
    except HfHubHTTPError as error:
        status, reason = error.response.status_code, error.server_message or first_line(error)
        advice = "; log in with: hf auth login" if status == HTTPStatus.UNAUTHORIZED else ""
        raise UserError(f"{repo} cannot be pushed: the Hub answered {status}: {_line(reason)}{advice}") from error
    except (HTTPError, ConnectionError, TimeoutError) as error:
        # Raised by requests, by uploads of large files (hf_xet) and with HF_HUB_OFFLINE.
        raise UserError(f"{repo} cannot be pushed: the connection to {ENDPOINT} failed: {_line(error)}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{repo} cannot be pushed: the server at {ENDPOINT} is not a Hub") from error
    except (ValueError, RuntimeError) as error:
        if not str(error).startswith(_FAILED_UPLOADS):
            raise
        raise UserError(f"{repo} cannot be pushed: {_line(error.__cause__ or error)}") from error


def _line(error: BaseException | str) -> str:
    return " ".join(str(error).split()).removesuffix(".")


def card(run: Run, repo: str) -> str:
    """Return the model card, with the data, algorithm, settings and main metrics of the model.

    Only the last component of absolute paths is included, and no URL: it may be of a private server.
    """
    config, algorithm = run.info["config"], str(run.info.get("algorithm"))
    is_classifier = bool(traits_of(run.info).get("classifier"))
    adapter = config["model"].get("lora") is not None and not is_classifier
    start = config["model"]
    base = "random weights" if start.get("new") is not None else str(run.facts["model"] or start["path"])
    model = {name: value for name, value in config["model"].items() if name != "path" or value == base}
    meta: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if is_classifier else "text-generation",
        "tags": ["cavesson", algorithm],
    }
    if _is_on_hub(base):
        meta["base_model"] = base
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in meta.items()), "---", ""]  # JSON is YAML
    lines += [f"# {repo.rpartition('/')[2]}", ""]
    lines += [f"{_short(base)} trained by {algorithm} with Cavesson {run.info.get('cavesson')}.", ""]
    lines += ["## Training", "", *_table(("", ""), _facts(run)), ""]
    lines += ["## Figures", "", *_table(("metric", "first step", "last step"), _figures(run)), ""]
    lines += ["## Settings", "", *_table(("setting", "value"), _settings({**config, "model": model})), ""]
    return "\n".join(lines)


def _facts(run: Run) -> Iterator[tuple[str, ...]]:
    info, config = run.info, run.info["config"]
    data = config.get("data", {})
    sources = [one.get("path") for one in data.get("mix") or [data]]
    yield "data", ", ".join(_short(str(path)) for path in sources if path) or "given in Python"
    if "rewards" in config:
        names = [_short(str(reward["use"])) for reward in config["rewards"]]
        yield "rewards", ", ".join(names) or "given in Python"
    yield "steps", str(info.get("steps"))
    yield "processes", str(info.get("processes"))
    yield "versions", ", ".join(f"{name} {version}" for name, version in info.get("versions", {}).items())


def _figures(run: Run) -> Iterator[tuple[str, ...]]:
    table = run.steps()
    for name in SHOWN:
        values = table[name].drop_null().to_pylist() if name in table.column_names else []
        if values:
            yield name, f"{values[0]:.4g}", f"{values[-1]:.4g}"


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        elif prefix + name != "run" and value is not None:
            yield prefix + name, json.dumps(_without_folders(value), ensure_ascii=False)


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return _short(value) if isinstance(value, str) else value


def _short(text: str) -> str:
    """Return the last component of an absolute path, and of a URL only its scheme; other texts are unchanged."""
    text = re.sub(r"\b([A-Za-z][A-Za-z0-9+.-]*://)[^\s\"']+", r"\1…", text)
    return text.replace("\\", "/").rpartition("/")[2] if os.path.isabs(text) else text


def _is_on_hub(name: str) -> bool:
    return not os.path.isabs(name) and not Path(name).exists() and name.count("/") == 1 and ":" not in name


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return [f"| {' | '.join(_cell(text) for text in line)} |" for line in lines]


def _cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(character, entity)
    return text
