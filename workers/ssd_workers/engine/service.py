"""EngineService: the one thread that owns the models.

Everything else hands it requests and receives events; no other thread touches a model, a cache
or a running sequence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from ssd_integrations.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from ssd_integrations.protocol import Event, GenerationRequest, ModelInfo, is_terminal
from ssd_workers.engine.chat_format import ChatFormat
from ssd_workers.engine.config import EngineConfig
from ssd_workers.engine.engine import Engine
from ssd_workers.engine.loading import LoadedModel, load_engine_models
from ssd_workers.engine.memory import CacheMemory
from ssd_workers.engine.openmp import release_threads
from ssd_workers.engine.request_builder import RequestBuilder
from ssd_workers.engine.sequence import Sequence
from ssd_workers.progress import Progress, no_progress

logger = logging.getLogger(__name__)

EventSink = Callable[[Event], None]


class EngineService:
    """Loads the models of ``config`` and decodes requests until closed.

    Thread-safe. ``on_event`` callbacks run on the engine thread and must not block: a slow one
    would slow every running request.
    """

    def __init__(self, config: EngineConfig, *, progress: Progress = no_progress) -> None:
        self.config = config
        self._progress = progress
        self._condition = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._cancels: set[str] = set()
        self._live: set[str] = set()
        self._draining = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._info: ModelInfo | None = None
        self._builder: RequestBuilder | None = None
        self._engine: Engine | None = None

    def start(self) -> None:
        """Load the models (blocking) and start the engine thread. Does nothing if started.

        Raises:
            DraftModelMismatchError, InvalidRequestError... naming what does not fit.
        """
        if self._thread is not None:
            return
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        target, draft = load_engine_models(self.config, self._progress)
        chat_format = ChatFormat(
            target.name,
            target.tokenizer,
            self.config.chat_template,
            tool_format=self.config.tool_format,
            reasoning_format=self.config.reasoning_format,
        )
        max_model_len = self._max_model_len(target)
        self._info = target.info(
            context_length=max_model_len,
            draft_model=draft.name if draft else None,
            has_chat_template=chat_format.has_template,
        )
        memory = CacheMemory.from_config(self.config, target, draft)
        logger.info(
            "Keys and values take %d bytes a token; there are %d MiB for them",
            target.runner.bytes_per_token,
            memory.budget // 2**20,
        )
        if memory.longest < max_model_len:
            logger.warning(
                "There is memory for %d tokens of a request, less than the context's %d",
                memory.longest,
                max_model_len,
            )
        self._builder = RequestBuilder(
            self.config, target, draft, chat_format, max_model_len, memory
        )
        self._engine = Engine(target, self._info, self.config.max_num_seqs, memory)
        # Loading is over; from now on another thread computes.
        release_threads()
        self._thread = threading.Thread(target=self._run, name="ssd-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: EventSink) -> None:
        """Queue a request. Events arrive as started, delta..., then one finished or failed.

        Raises:
          SSDError: the request cannot be decoded here (wrong model, prompt too long, no chat
            template...); ``on_event`` is then never called.
        """
        sequence = self._builder_or_raise().build(request, self._guarded(on_event))
        with self._condition:
            if self._draining or self._closing:
                raise OverloadedError(
                    "This engine is shutting down and takes no new requests.",
                    remedy="Send the request again; another worker will take it.",
                )
            if request.request_id in self._live:
                raise InvalidRequestError(
                    f"request_id={request.request_id!r} is already running.",
                    remedy="Give every request an id of its own.",
                )
            self._live.add(request.request_id)
            self._inbox.append(sequence)
            self._condition.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Stop a request at the next step boundary; False if it is not waiting or running."""
        with self._condition:
            if request_id not in self._live:
                return False
            self._cancels.add(request_id)
            self._condition.notify_all()
            return True

    def info(self) -> ModelInfo:
        """What is loaded."""
        if self._info is None:
            raise EngineError("The engine is not started.")
        return self._info

    def count_tokens(self, request: GenerationRequest) -> int:
        """How many tokens the prompt of ``request`` has."""
        return len(self._builder_or_raise().encode(request))

    def use_drafters(self, name: str, *, fresh: bool) -> None:
        """Let requests from now on use the drafters called ``name``; see the local backend."""
        self._builder_or_raise().use_drafters(name, fresh=fresh)

    def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the live ones; False if some are left."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._draining = True
            return self._condition.wait_for(
                lambda: not self._live, timeout=max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        """Cancel what runs, stop the thread and free the models. Safe to call twice."""
        with self._condition:
            self._closing = True
            self._cancels.update(self._live)
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._engine = None
        builder, self._builder = self._builder, None
        if builder is not None:
            builder.close()

    def __enter__(self) -> EngineService:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _max_model_len(self, target: LoadedModel) -> int:
        limit = self.config.max_model_len
        if limit is not None and limit > target.context_length:
            raise InvalidRequestError(
                f"max_model_len={limit} is more than the {target.context_length} tokens of "
                f"model {target.name!r}."
            )
        return limit or target.context_length

    def _builder_or_raise(self) -> RequestBuilder:
        if self._builder is None:
            raise EngineError("The engine is not started or already closed.")
        return self._builder

    # ---- engine thread -------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._engine
        assert engine is not None
        while self._take_commands(engine):
            try:
                engine.step()
            except Exception as error:
                # The boundary of the engine thread. A step that raised may have left caches
                # half-written: its sequences cannot go on, but the models are intact and the
                # next request can.
                logger.exception("An engine step failed")
                failure = EngineError(f"The engine step failed: {type(error).__name__}: {error}.")
                for sequence in engine.sequences:
                    engine.fail(sequence, failure)

    def _take_commands(self, engine: Engine) -> bool:
        """Move new requests and cancellations into the engine; False when it is time to end."""
        with self._condition:
            if not self._has_commands(engine):
                release_threads()
                self._condition.wait_for(lambda: self._has_commands(engine))
            while self._inbox:
                engine.add(self._inbox.popleft())
            for sequence in engine.sequences:
                if sequence.request_id in self._cancels:
                    sequence.cancelled = True
            self._cancels.clear()
            return engine.has_work or not self._closing

    def _has_commands(self, engine: Engine) -> bool:
        return bool(self._inbox or self._cancels or engine.has_work or self._closing)

    def _guarded(self, on_event: EventSink) -> EventSink:
        def deliver(event: Event) -> None:
            try:
                on_event(event)
            except Exception:
                # Somebody else's callback must not take the other requests down with it.
                logger.exception("The event callback of request %s failed", event.request_id)
                self.cancel(event.request_id)
            if is_terminal(event):
                with self._condition:
                    self._live.discard(event.request_id)
                    self._condition.notify_all()

        return deliver
