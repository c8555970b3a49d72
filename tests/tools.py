"""Tools that the tests offer, and models whose tokenizers have tokens for calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AddedToken

from ssd_integrations.protocol import FinishReason, Tool
from ssd_workers.engine.output_parsers.calls import CallParser
from ssd_workers.engine.output_parsers.formats import FORMATS
from ssd_workers.engine.output_parsers.output import ParsedOutput
from ssd_workers.engine.output_parsers.parts import CallEnd, Part
from ssd_workers.engine.output_parsers.thinking import ThinkingParser
from tests.structures import SCHEMAS
from tests.tiny import VOCAB_SIZE, make_tiny_model

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
PERSON: dict[str, Any] = {"name": "add-person", "parameters": SCHEMAS["person"]}
NOW: dict[str, Any] = {"name": "now", "description": "The time."}
TOOLS = tuple(Tool(**tool) for tool in (WEATHER, PERSON, NOW))
PARAMETERS = {tool.name: tool.parameters for tool in TOOLS}
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
#: A template in the manner of Qwen's: it lists tools, and thinks if it is told to.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}"
    "{% endfor %}{{ '\\n' }}Answer with <tool_call>\n{...}\n</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
THINKING_TEMPLATE = TOOL_TEMPLATE + "<think>\n{# content.split('</think>') #}"


def make_tool_model(path: Path, arch: str = "llama", template: str = TOOL_TEMPLATE) -> Path:
    """Save a tiny random model whose vocabulary has every marker as a token of its own."""
    from transformers import PreTrainedTokenizerFast

    size = VOCAB_SIZE + len(SPECIAL) + len(NOT_SPECIAL) + 1
    make_tiny_model(path, arch, vocab_size=size, max_position_embeddings=4096)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in SPECIAL], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in NOT_SPECIAL])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def parsed(
    form: str,
    pieces: list[str],
    *,
    names: tuple[str, ...] = tuple(PARAMETERS),
    reason: FinishReason = "stop",
    parallel: bool = True,
    thinking: ThinkingParser | None = None,
) -> tuple[ParsedOutput, list[Part]]:
    """What the parsers make of ``pieces``: the whole, and the parts one after the other."""
    calls = CallParser(FORMATS[form], names, parallel=parallel, make_id=lambda n: f"id{n}")
    output = ParsedOutput(thinking, calls)
    parts = [part for piece in pieces for part in output.push(piece)]
    return output, parts + output.finish(reason)


def raw_text(parts: list[Part]) -> str:
    """What the model wrote, put together from its parts."""
    whole = (part for part in parts if type(part).__name__ not in ("CallStart", "CallArguments"))
    return "".join(part.raw if isinstance(part, CallEnd) else part.text for part in whole)  # type: ignore[union-attr]
