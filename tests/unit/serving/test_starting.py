"""Before a server answers: options, addresses and engines that it refuses, a model that is missing, and `try`."""

import logging
from pathlib import Path

import httpx
import pytest

import torchlake as tl
from serving_runs import free_port
from torchlake.cli.main import main
from torchlake.errors import PortTaken, TorchlakeError, UsageError
from torchlake.serving.options import ServeOptions
from torchlake.serving.process import address_of, listen, pause, try_out


def test_a_port_that_is_taken_and_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1 is taken") as raised:
            listen("127.0.0.1", port)
    assert raised.value.exit_code == 2
    with pytest.raises(UsageError, match="host: '192.0.2.1' is not an address of this machine"):
        listen("192.0.2.1", 0)
    for options, words in (
        ({"max_rows": 0}, "max_rows: must be at least 1"),
        ({"queue_timeout": 0.0}, "queue_timeout: must be at least 0.001"),
        ({"api_key": ""}, "API key"),
        ({"api_key": " secret"}, "with no spaces around"),
        ({"allow_origin": ("https://a.example/",)}, "allow_origin: 'https://a.example/' is not an origin"),
        ({"allow_origin": ("a.example",)}, "allow_origin: 'a.example' is not an origin"),
        ({"port": 99999}, "port: must be at most 65535"),
        ({"max_body": "large"}, "max_body: 'large' is not an amount"),
    ):
        with pytest.raises(UsageError, match=words):
            ServeOptions(**options)  # type: ignore[arg-type]
    assert (pause(0), pause(1), pause(5000)) == (0, 1, 60)
    with listen("::1", 0) as other:
        assert address_of(other) == f"http://[::1]:{other.getsockname()[1]}"
    assert main(["try", "a model", "--host", "0.0.0.0"]) == 64
    assert "try is for this machine" in capsys.readouterr().err


def test_try_closes_its_socket_if_there_is_no_model(tmp_path: Path) -> None:
    options = ServeOptions(port=free_port(), page=True)
    with pytest.raises(TorchlakeError) as raised:
        try_out(tmp_path, options=options, read=input)
    listen("127.0.0.1", options.port).close()  # while `raised` keeps what the failed call had
    assert str(tmp_path) in str(raised.value)


def test_try_has_a_page_and_answers_in_the_terminal(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def read(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) > 1:
            raise EOFError
        (url, *_) = capsys.readouterr().out.split()
        assert "<form" in httpx.get(url, trust_env=False, timeout=60).text
        return "good film"

    assert try_out(tiny_model, options=ServeOptions(port=0, page=True), read=read) == 0
    (expected,) = tl.load(tiny_model)(["good film"])
    assert asked == ["text> ", "text> "]
    assert capsys.readouterr().out == "".join(f"  {name}: {value}\n" for name, value in expected.items())


def test_an_address_of_others_without_a_token_is_warned_of(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for api_key, warnings in ((None, 1), ("secret", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), pytest.raises(UsageError, match="not an address of this machine"):
            tl.serve(tiny_model, options=ServeOptions(host="192.0.2.1", port=0, api_key=api_key))
        assert caplog.text.count("anyone who reaches this address can use the model") == warnings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "spark"], "Spark serves nothing: use Ray (--engine ray), or no engine"),
        (["--set", "engine.ray.autoscaling.max_replicas=4"], "name the engine"),
        (["--api-key", "secret"], "--api-key"),  # the arguments of a process are seen by others
        (["--api-key-file", "none"], "none: cannot be read"),
        (["--max-rows", "0"], "--max-rows: must be at least 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_are_refused(
    tiny_model: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tiny_model), *options]) == UsageError.exit_code
    assert words in capsys.readouterr().err


def test_a_model_that_writes_is_refused(tiny_gpt2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--engine", "ray"]):
        assert main(["serve", str(tiny_gpt2), "--port", "0", *options]) == UsageError.exit_code
        assert "Use `transformers serve` or vLLM" in capsys.readouterr().err
