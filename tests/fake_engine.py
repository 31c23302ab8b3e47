"""An engine that stands where vLLM stands: it speaks the protocol, under the interpreter of the tests.

`interpreter(folder, **how)` writes an executable that torchlake takes for the Python of a runtime: it runs this file in
place of the server's. Rows are written by transformers' `generate` one at a time with `kind="model"`; else, without
torch, an answer is the prompt in reverse, and the last row that came ends first. `fault="add:5"` makes the process
misbehave at its fifth row; with `once=FILE` only the first one, with `times=N` and `folder=FOLDER` the first N.
"""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

PROTOCOL = Path(__file__).parents[1] / "src" / "torchlake" / "runtimes" / "_foreign" / "protocol.py"


def interpreter(folder, **how):
    """Return the path of an executable that runs this file as a server."""
    given = " ".join(f"ENGINE_{name.upper()}={shlex.quote(str(value))}" for name, value in how.items())
    path = Path(folder, f"python-{len(list(Path(folder).glob('python-*')))}")
    run = f"{shlex.quote(sys.executable)} -I {shlex.quote(__file__)}"
    path.write_text(f'#!/bin/sh\nshift 2\nexec env {given} {run} "$@"\n')
    path.chmod(0o755)
    return str(path)


def setting(name, default=""):
    return os.environ.get(f"ENGINE_{name}", default)


def fault():
    """Return the name and the number of the fault of this process."""
    name, _, nth = setting("FAULT").partition(":")
    for number in range(int(setting("TIMES", "1"))) if setting("ONCE") else ():
        try:
            os.close(os.open(f"{setting('ONCE')}{number or ''}", os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            continue
    else:
        if setting("ONCE"):
            return "", 0
    return name, int(nth or 1)


class Echo:
    """Without torch, for faults."""

    def __init__(self, hello):
        self.open, self.hello, self.seen, self.sent = [], hello, 0, 0
        self.fault, self.nth = fault()
        if self.fault == "start":
            sys.stderr.write("no memory for the cache\n")
            os._exit(3)
        if self.fault == "refuse":
            raise ValueError("a model of this kind is not known")
        if setting("CHILD"):
            subprocess.Popen(["sleep", "600"])
        if setting("STARTS"):
            with open(setting("STARTS"), "a") as file:
                file.write(f"{os.getpid()} {hello['length']}\n")
        self.token_s = float(setting("TOKEN_US", "0")) / 1e6
        self.versions, self.limits = versions(False), {"open": int(setting("OPEN", "8"))}

    @property
    def busy(self):
        return bool(self.open)

    def add(self, row, ids, options):
        self.seen += 1
        if setting("SLOW"):
            time.sleep(float(setting("SLOW")))
        if self.fault == "noise":
            for _ in range(self.nth):
                os.write(1 + self.seen % 2, b"x" * (1 << 20))
        self.at("add", self.seen)
        if setting("KILLER") and int(setting("KILLER")) in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if (setting("SLEEPER") and int(setting("SLEEPER")) in ids) or (
            self.fault == "silent" and self.seen == self.nth
        ):
            time.sleep(3600)
        if setting("REFUSED") and int(setting("REFUSED")) in ids:
            raise ValueError("this prompt is refused")
        self.open.append((row, ids, options))

    def at(self, name, number):
        if self.fault == name and number == self.nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self):
        rows = [self.open.pop() for _ in range(1 if self.fault else len(self.open))]
        answers = [self.answer(*one) for one in rows]
        self.at("compute", self.sent + 1)
        self.sent += len(answers)
        if self.fault == "number" and self.sent == self.nth:
            return [(answers[0][0] + 1000, *answers[0][1:])]
        if self.fault == "ids" and self.sent == self.nth:
            return [(answers[0][0], "length", [1 << 20], [])]
        if self.fault == "long" and self.sent == self.nth:
            return [(answers[0][0], "length", [1] * 1000, [])]
        return answers * (2 if self.fault == "double" and self.sent == self.nth else 1)

    def answer(self, row, ids, options):
        end, most = options["stop_token_ids"][0], options["max_tokens"]
        tokens = [one for one in ids[::-1] if one != end][:most]
        tokens += [end] if len(tokens) < most else []
        if self.token_s:
            until = time.process_time() + self.token_s * len(tokens)
            while time.process_time() < until:
                pass
        probabilities = [-0.5] * len(tokens) if "logprobs" in options else []
        return row, "end" if tokens[-1] == end else "length", tokens, probabilities


class Model(Echo):
    """The model, greedily, by transformers."""

    def __init__(self, hello):
        super().__init__(hello)
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(hello["model"], dtype=torch.float32).eval()

    def answer(self, row, ids, options):
        ends = options["stop_token_ids"]
        given = {"max_new_tokens": options["max_tokens"], "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        with self.torch.inference_mode():
            prompt = self.torch.tensor([ids])
            made = self.model.generate(prompt, attention_mask=self.torch.ones_like(prompt), **given)
        tokens = made[0, len(ids) :].tolist()
        return row, "end" if tokens[-1] in ends else "length", tokens, []


def versions(imported):
    return {"vllm": setting("VERSION", "0.33.0")}


def main():
    spec = importlib.util.spec_from_file_location("torchlake_protocol", PROTOCOL)
    protocol = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protocol)
    protocol.VERSION = int(setting("PROTOCOL", protocol.VERSION))
    send = protocol.Pipes.send
    done = 0

    def sent(self, content):
        nonlocal done
        name, nth = setting("FAULT").partition(":")[::2]
        done += b'"done"' in content
        if b'"done"' in content and done == int(nth or 1) and name in ("torn", "header", "sent"):
            if name == "header":
                content = b"\xff" * 40
            send(self, content[: len(content) // 2] if name == "torn" else content)
            os.kill(os.getpid(), signal.SIGKILL) if name != "header" else time.sleep(3600)
        send(self, content)

    protocol.Pipes.send = sent
    protocol.serve({"model": Model}.get(setting("KIND"), Echo), versions)


if __name__ == "__main__":
    main()
