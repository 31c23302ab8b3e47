"""Engines in a Python of their own: rows go to another process and come back, in any order, over two pipes.

In: an interpreter, a server file, prompts as token ids. Out: answers as token ids, or an error of the row.
Read `protocol.py` first: the frames, and the loop of a server; it imports the standard library only, because both sides
load it. `process.py` starts, watches and ends a server; `writer.py` is the Writer that has the rows, and finds those
that kill it; `vllm_server.py` runs under the other interpreter.
"""
