"""Label a table by a model behind an endpoint, with its cost: a limit stops the job half way, and it continues.

Without --endpoint it starts a stand-in on this machine, which looks for words, so that nothing is paid. A real one:

    transformers serve &
    python examples/endpoint.py reviews.parquet labeled/ --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-0.6B
"""

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

import torchlake as tl
from torchlake.errors import LimitReached

ROWS = 500
PRICE = {"input": 0.25, "cached": 0.025, "output": 2.0}
"Per million tokens."
PROMPT = "Is this review positive or negative? Answer with one word. {text}"


class StandIn(BaseHTTPRequestHandler):
    """An endpoint that knows a few words."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"].lower()
        bad = any(word in text for word in ("bad", "dull", "poor", "terrible", "awful", "boring"))
        answer = json.dumps({"answer": "negative" if bad else "positive"})
        message = {"role": "assistant", "content": answer}
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": 1}
        found = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def stand_in() -> Iterator[str]:
    """Yield the address of a stand-in for a model, on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def label(table: str, output: Path, endpoint: str, model: str, rows: int) -> None:
    """Label rows with half of what that costs, then with more; print both, and check the output."""
    options: dict[str, Any] = {"endpoint": endpoint, "model_name": model, "prompt": PROMPT, "price": {model: PRICE}}
    options |= {"choices": ["positive", "negative"], "max_new_tokens": 8}
    try:
        tl.predict(None, table, output, limit=rows, max_tokens_total=rows * 12, **options)
    except LimitReached as stop:
        print(f"stopped: {stop}")
    done = tl.predict(None, table, output, limit=rows, max_tokens_total=rows * 1000, **options)
    usage = done.record["provenance"]["usage"]
    print(f"{done.rows_out:,} rows, {done.rows_failed:,} failed, cost {usage['cost']:.6f}")
    labels = pc.value_counts(tl.open(output).to_table()["generated_text"]).to_pylist()
    print(", ".join(f"{one['values']}: {one['counts']:,}" for one in labels))
    assert not tl.verify(output).problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="Table with a column `text`.")
    parser.add_argument("output", type=Path, help="Folder for the labeled rows.")
    parser.add_argument("--endpoint", help="OpenAI-compatible endpoint (default: a stand-in on this machine).")
    parser.add_argument("--model", default="stand-in", help="Name of the model there.")
    parser.add_argument("--rows", type=int, default=ROWS)
    given = parser.parse_args()
    if given.endpoint:
        label(given.table, given.output, given.endpoint, given.model, given.rows)
    else:
        with stand_in() as address:
            label(given.table, given.output, address, given.model, given.rows)
