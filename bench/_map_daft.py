"""Daft's part of bench/map.py, in an environment of its own: a class that it makes in processes of its own."""

import json
import sys
import time

import daft
from _map_function import BATCH, make_signature


def main() -> None:
    source, output, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])

    @daft.cls(max_concurrency=processes, use_process=True)
    class Signature:
        def __init__(self) -> None:
            self.signature = make_signature()

        @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=BATCH)
        def __call__(self, texts: daft.Series) -> list[str]:
            return [self.signature(text) for text in texts.to_pylist()]

    began = time.monotonic()
    frame = daft.read_parquet(f"{source}/*.parquet")
    frame.select(frame["id"], Signature()(frame["text"]).alias("signature")).write_parquet(output)
    print(json.dumps({"seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
