"""A LlamaIndex query over three documents on the demo model.

python examples/llamaindex_query.py
python examples/llamaindex_query.py --broker-url redis://localhost:6379/0
"""

from __future__ import annotations

import argparse

from llama_index.core import Document, SummaryIndex
from llama_index.core.base.response.schema import StreamingResponse

from ssd_integrations import SSDLLM

DOCUMENTS = [
    "A red light on the router means that it has no connection to the street cabinet.",
    "Hold the reset button for ten seconds to restart the router. Settings are kept.",
    "The service desk is open from 8 to 20 o'clock on working days.",
]


def main() -> None:
    """Ask one question and stream the answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default="The light is red. What should I do first?")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--broker-url", help="of the workers; without it the model runs here")
    arguments = parser.parse_args()

    llm = SSDLLM(
        model=arguments.model,
        broker_url=arguments.broker_url,
        context_window=4096,
        max_tokens=160,
    )
    # A summary index hands every document to the model, so no embedding model is needed.
    index = SummaryIndex.from_documents([Document(text=text) for text in DOCUMENTS])
    engine = index.as_query_engine(llm=llm, streaming=True)
    response = engine.query(arguments.question)
    assert isinstance(response, StreamingResponse)
    for piece in response.response_gen:
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
