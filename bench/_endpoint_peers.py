"""The contenders of bench/endpoint_faults.py: rows of a table are answered by an endpoint, and stored as Parquet.

python bench/_endpoint_peers.py CONTENDER TABLE OUTPUT URL
"""

import os
import sys
from typing import Any

MODEL = "small"
OPEN = 16
"Requests that may be open."


def torchlake(table: str, output: str, url: str) -> None:
    import torchlake as tl

    tl.predict(None, table, output, endpoint=url, model_name=MODEL, key="id", concurrency=OPEN, engine=tl.Local(1))


def daft(table: str, output: str, url: str, **options: Any) -> None:
    import daft
    from daft.ai.openai.provider import OpenAIProvider
    from daft.functions.ai import prompt

    asked = prompt(
        daft.col("text"),
        provider=OpenAIProvider(base_url=url, api_key="none"),
        model=MODEL,
        use_chat_completions=True,
        **options,
    )
    daft.read_parquet(table).select("id", asked.alias("answer")).write_parquet(output)


def daft_log(table: str, output: str, url: str) -> None:
    daft(table, output, url, on_error="log")


def ray(table: str, output: str, url: str, *, errored_blocks: int = 0) -> None:
    import ray
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    ray.data.DataContext.get_current().max_errored_blocks = errored_blocks
    config = HttpRequestProcessorConfig(url=f"{url}/chat/completions", batch_size=OPEN, concurrency=1)
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "id": row["id"],
            "payload": {"model": MODEL, "messages": [{"role": "user", "content": row["text"]}]},
        },
        postprocess=lambda row: {
            "id": row["id"],
            "answer": row["http_response"]["choices"][0]["message"]["content"],
        },
    )
    processor(ray.data.read_parquet(table)).write_parquet(output)


def ray_blocks(table: str, output: str, url: str) -> None:
    ray(table, output, url, errored_blocks=-1)


CONTENDERS = {
    "torchlake": torchlake,
    "daft": daft,
    "daft_log": daft_log,
    "ray": ray,
    "ray_blocks": ray_blocks,
}

if __name__ == "__main__":
    os.setpgid(0, 0)  # killed as a whole
    CONTENDERS[sys.argv[1]](*sys.argv[2:])
