"""The jobs of the demo, through the public adapters alone: any chat model would do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssd_workflows.demo.material import (
    COMPLETION_PROMPT,
    CUSTOMER_MESSAGE,
    HELP_ARTICLE,
    SALES,
    SECTION_INSTRUCTIONS,
    SUPPORT_INSTRUCTIONS,
    misplaced_figures,
    section_prompt,
)

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from llama_index.core.llms import LLM


@dataclass(frozen=True)
class Section:
    """One finished section; ``misplaced`` lists figures that are not facts of their region."""

    name: str
    text: str
    misplaced: list[str]


def support_reply(llm: BaseChatModel, on_text: Callable[[str], None]) -> str:
    """Stream the reply to a customer through prompt | model | parser."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    prompt = ChatPromptTemplate.from_messages(
        [("system", SUPPORT_INSTRUCTIONS), ("human", "{question}")]
    )
    chain = prompt | llm | StrOutputParser()
    pieces = []
    for piece in chain.stream({"article": HELP_ARTICLE, "question": CUSTOMER_MESSAGE}):
        on_text(piece)
        pieces.append(piece)
    return "".join(pieces)


def completion(llm: LLM) -> str:
    """One call through LlamaIndex."""
    return str(llm.complete(COMPLETION_PROMPT).text).strip()


def report_sections(
    llm: BaseChatModel, on_words: Callable[[str, int, bool], None], names: list[str]
) -> list[Section]:
    """Write the sections, all queued at once.

    ``on_words`` is told, from several threads, a section's name, its words so far and whether
    it is done.
    """
    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        return list(pool.map(lambda name: _section(llm, name, on_words), names))


def _section(llm: BaseChatModel, name: str, on_words: Callable[[str, int, bool], None]) -> Section:
    pieces: list[str] = []
    for chunk in llm.stream(list(section_messages(name))):
        pieces.append(str(chunk.text))
        on_words(name, len("".join(pieces).split()), False)
    text = "".join(pieces)
    on_words(name, len(text.split()), True)
    return Section(name, text, misplaced_figures(name, text))


def section_names() -> list[str]:
    """The sections of the report, in order."""
    return list(SALES)


def section_messages(name: str) -> tuple[dict[str, str], ...]:
    """The chat messages that ask for one section."""
    return (
        {"role": "system", "content": SECTION_INSTRUCTIONS},
        {"role": "user", "content": section_prompt(name)},
    )
