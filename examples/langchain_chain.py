"""A LangChain chain on the demo model: streamed, with usage and speculation statistics.

python examples/langchain_chain.py
python examples/langchain_chain.py --broker-url redis://localhost:6379/0
"""

from __future__ import annotations

import argparse

from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate

from ssd_integrations import ChatSSD

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You answer customers of an internet provider in three sentences."),
        ("human", "{question}"),
    ]
)


def main() -> None:
    """Stream one answer and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default="My router blinks red. What should I do?")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--broker-url", help="of the workers; without it the model runs here")
    arguments = parser.parse_args()

    llm = ChatSSD(model=arguments.model, broker_url=arguments.broker_url, max_tokens=160)
    last: AIMessage | None = None
    for chunk in (PROMPT | llm).stream({"question": arguments.question}):
        print(chunk.text, end="", flush=True)
        last = chunk  # usage and statistics come with the last chunk
    assert last is not None
    speculation = last.response_metadata["speculation"]
    timing = last.response_metadata["timing"]
    print(
        f"\n\n{last.usage_metadata}\n"
        f"{timing['tokens_per_second']:.1f} tokens/s, "
        f"{speculation['mean_acceptance_length']:.2f} tokens per pass of the model "
        f"({speculation['method']})"
    )


if __name__ == "__main__":
    main()
