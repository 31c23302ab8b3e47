"""A real HTTP server that answers as OpenAI-compatible endpoints do, and breaks where it is asked to.

    with serving(faults={3: "503", 5: "reset"}) as endpoint:
        predict(None, table, output, endpoint=endpoint.url, model_name="small")

Faults are by the number of a request (from 1), or by a text in its body: `{"row 7": "html"}` has it each time, and
`{"row 7": ["429", "503"]}` once each. It runs in a thread of its own or, `python fake_endpoint.py`, as a process.
"""

import asyncio
import base64
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Faults = Mapping[int | str, str | list[str]]
STATUS = {"408": "Request Timeout", "429": "Too Many Requests", "503": "Service Unavailable"}
MODELS = ("small", "embedder")


@dataclass
class Request:
    """A request that arrived."""

    at: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def text(self) -> str:
        """The prompt: the last message, or the input."""
        if "messages" in self.body:
            return str(self.body["messages"][-1]["content"])
        return str(self.body.get("prompt", self.body.get("input")))


@dataclass
class FakeEndpoint:
    """The endpoint, and what it has seen."""

    faults: Faults = field(default_factory=dict)
    latency_s: float = 0.0
    gates: tuple[int, ...] = ()
    "How many requests must have been open at once before the first is answered, the second, ...; all others: the last."
    key: str | None = None
    "The key that requests need."
    elsewhere: str = "http://127.0.0.1:9"
    "Where redirects to another host lead."
    requests: list[Request] = field(default_factory=list)
    answered: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    lost_batches: int = 0
    "Batches that are begun, but the endpoint's answer is lost."
    most_open: int = 0
    port: int = 0
    _open: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _left: dict[str, list[str]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def texts(self) -> list[str]:
        """The prompts of all requests."""
        return [one.text for one in self.requests]

    def fault(self, number: int, body: str) -> str | None:
        """Return the fault of a request."""
        if number in self.faults:
            return str(self.faults[number])
        for text, fault in self.faults.items():
            if isinstance(text, str) and text in body:
                if isinstance(fault, str):
                    return fault
                left = self._left.setdefault(text, list(fault))
                return left.pop(0) if left else None
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines) if n}
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                path = first.split()[1]
                if path.startswith(("/v1/files", "/v1/batches")):
                    await self.send(writer, self.of_batches(f"{first.split()[0]} {path}", content))
                    continue
                request = Request(time.monotonic(), first.split()[1], headers, json.loads(content))
                self.requests.append(request)
                number = len(self.requests)
                self._open += 1
                await self.opened()
                try:
                    fault = self.fault(number, content.decode())
                    await self.gate(number)
                    await asyncio.sleep(self.latency_s)
                    if not await self.answer(writer, request, fault, number):
                        return
                finally:
                    self._open -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def opened(self) -> None:
        """Count the open requests; whoever waits at a gate looks again."""
        self.most_open = max(self.most_open, self._open)
        async with self._changed:
            self._changed.notify_all()

    async def gate(self, number: int) -> None:
        """Wait at the gate of a request; raises TimeoutError, which closes its connection, if it never opens."""
        if self.gates:
            least = self.gates[min(number, len(self.gates)) - 1]
            async with asyncio.timeout(60), self._changed:
                await self._changed.wait_for(lambda: self.most_open >= least)

    async def send(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()

    def of_batches(self, asked: str, content: bytes) -> bytes:
        """Answer requests for files and batches; a batch has ended when it is looked at the second time."""
        path = asked.split()[1]
        if path == "/v1/files":
            start = content.index(b'{"custom_id"')
            name = f"file-{len(self.files)}"
            self.files[name] = content[start : content.rindex(b"}\n") + 2]
            return json.dumps({"id": name}).encode()
        if path.startswith("/v1/files/"):
            return self.files[path.split("/")[3]]
        if asked == "POST /v1/batches":
            name, file = f"batch-{len(self.batches)}", json.loads(content)["input_file_id"]
            self.batches[name] = {"id": name, "status": "validating", "input_file_id": file}
            if self.lost_batches:
                self.lost_batches -= 1
                raise ConnectionError("its answer is lost")
            return json.dumps(self.batches[name]).encode()
        if path.startswith("/v1/batches?"):  # one on a page, the newest first
            names = list(self.batches)[::-1]
            names = names[names.index(path.partition("&after=")[2]) + 1 :] if "&after=" in path else names
            return json.dumps({"data": [self.batches[one] for one in names[:1]], "has_more": names[1:] != []}).encode()
        batch = self.batches[path.split("/")[3]]
        if batch["status"] == "validating":
            batch["status"] = "in_progress"
        elif batch["status"] == "in_progress":
            self.end(batch)
        return json.dumps(batch).encode()

    def end(self, batch: dict[str, Any]) -> None:
        lines, errors = [], []
        for line in self.files[batch["input_file_id"]].splitlines():
            one = json.loads(line)
            request = Request(time.monotonic(), one["url"], {}, one["body"])
            self.requests.append(request)
            fault = self.fault(len(self.requests), json.dumps(one["body"])) or ""
            if fault == "lost":
                continue
            status = int(fault) if fault.isdigit() else 200
            body = {"error": {"message": f"fault {fault}"}} if status != 200 else self.value(request, fault)
            response = {"status_code": status, "request_id": f"req-{len(self.requests)}", "body": body}
            (lines if status == 200 else errors).append({"custom_id": one["custom_id"], "response": response})
        for kind, some in (("output", lines), ("error", errors)):
            if some:
                self.files[f"{kind}-{batch['id']}"] = "".join(f"{json.dumps(one)}\n" for one in some[::-1]).encode()
                batch[f"{kind}_file_id"] = f"{kind}-{batch['id']}"
        batch["status"] = "completed"

    async def answer(self, writer: asyncio.StreamWriter, request: Request, fault: str | None, number: int) -> bool:
        """Send an answer; return whether the connection goes on."""
        name, _, more = (fault or "").partition(":")
        if more == "same" and request.path.endswith("?again=1"):
            name = more = ""
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            name = "401"
        if name == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER: a reset in place of an end
            return False
        if name == "silent":
            await asyncio.sleep(60)
        value, headers = self.value(request, name), {}
        status = 200
        if name.isdigit():
            status, said = int(name), more if more and not more.replace(".", "").isdigit() else f"fault {name}"
            value = {"error": {"message": said, "code": None}}
            if name == "429" and more and said != more:
                headers["Retry-After"] = more
        if name == "401":
            value["error"]["message"] = f"bad key {request.headers.get('authorization')}"
        if name in ("301", "307", "308"):
            headers["Location"] = request.path if more == "same" else f"{self.elsewhere}/v1/x"
            headers["Location"] += "?again=1" if more == "same" else ""
        if name in ("quota", "quota403", "402"):
            code = None if name == "402" else "insufficient_quota"
            status, value = int(name[-3:] if name != "quota" else 429), {"error": {"message": "no money", "code": code}}
        if name == "model":
            status, value = 404, {"error": {"message": "The model does not exist", "code": "model_not_found"}}
        if name == "filtered":
            status, value = 400, {"error": {"message": "blocked", "code": "content_filter"}}
        if name.startswith("echo") and name != "echokey":
            status, value = int(name[4:]), {"error": {"message": f"got {request.headers.get('authorization')}"}}
        content = json.dumps(value).encode()
        if name == "echo503" and self.key is not None:  # as JSON may write it
            content = content.replace(self.key.encode(), "".join(f"\\u{ord(one):04x}" for one in self.key).encode())
        content = {"html": b"<html><body>Sign in</body></html>", "half": content[: len(content) // 2]}.get(
            name, content
        )
        length = len(content) + (100 if name == "cut" else 0)
        lines = [f"HTTP/1.1 {status} {STATUS.get(str(status), 'OK')}", f"Content-Length: {length}"]
        lines += ["Content-Type: application/json", f"X-Request-Id: req-{number}"]
        lines += [f"{each}: {text}" for each, text in headers.items()]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        if name == "slow":
            for byte in content:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.2)
        writer.write(content)
        await writer.drain()
        self.answered += status == 200
        return name != "cut"

    def value(self, request: Request, fault: str) -> dict[str, Any]:
        """Return the body of an answer."""
        body, text = request.body, request.text
        usage = self.usage(text)
        if request.path.startswith("/v1/embeddings"):
            numbers = [float(len(text)), 1.0, -0.5]
            coded = base64.b64encode(struct.pack("<3f", *numbers)).decode()
            vector = coded if body.get("encoding_format") == "base64" else numbers
            usage.pop("completion_tokens", None)
            return {"data": [{"index": 0, "embedding": vector}], "usage": usage}
        if fault == "error200":
            return {"error": {"message": "upstream failed", "code": 502}}
        if fault == "nochoices":
            return {"object": "chat.completion", "choices": [], "usage": usage}
        choices = [self.choice(request, fault, number) for number in range(body.get("n", 1))]
        return {"choices": choices[1:] if fault == "few" else choices, "usage": usage}

    def usage(self, text: str) -> dict[str, Any]:
        """Return the counts of an answer."""
        return {
            "prompt_tokens": len(text.split()),
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def choice(self, request: Request, fault: str, number: int) -> dict[str, Any]:
        """Return an answer's choice: the prompt again, as JSON if the request wants that."""
        text = f"echo {request.text}" + (f" #{number}" if number else "")
        if "response_format" in request.body and fault != "plain":
            schema = request.body["response_format"]["json_schema"]["schema"]
            text = json.dumps({"answer": schema["properties"].get("answer", {}).get("enum", [text])[0]})
        if fault == "echokey":
            text = f"your key is {request.headers.get('authorization')}"
        reason = {"length": "length", "filter": "content_filter"}.get(fault, "stop")
        if "messages" not in request.body:
            logprobs = {"token_logprobs": [None, -0.25, -0.75]} if request.body.get("logprobs") else None
            return {"index": number, "text": text, "finish_reason": reason, "logprobs": logprobs}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if fault == "refusal":
            message |= {"content": None, "refusal": "I cannot help with that."}
        if fault == "think":
            message |= {"reasoning_content": "Let me see."}
        if fault == "call":
            call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            message |= {"content": None, "tool_calls": [call]}
        if fault == "empty":
            message, reason = {**message, "content": ""}, "length"
        tokens = [{"token": "a", "logprob": -0.25}, {"token": "b", "logprob": -0.75}]
        logprobs = {"content": tokens} if request.body.get("logprobs") else None
        return {"index": number, "message": message, "finish_reason": reason, "logprobs": logprobs}


@contextmanager
def serving(**options: Any) -> Iterator[FakeEndpoint]:
    """Run an endpoint in a thread, on a free port."""
    endpoint, started, loop = FakeEndpoint(**options), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(endpoint.serve, "127.0.0.1", endpoint.port, backlog=1024)
        endpoint.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()

    def main() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(run())
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    started.wait()
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


if __name__ == "__main__":  # for other processes: prints its port, serves until its input ends, prints what it saw
    with serving(latency_s=float(sys.argv[1]) if sys.argv[1:] else 0.0) as served:
        print(served.port, flush=True)
        sys.stdin.read()
        seen = {"texts": served.texts, "times": [one.at for one in served.requests], "open": served.most_open}
        print(json.dumps(seen), flush=True)
