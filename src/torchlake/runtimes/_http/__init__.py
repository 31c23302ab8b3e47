"""Requests to OpenAI-compatible endpoints: what the runtime `http` sends, how fast, and what it makes of the answers.

In: a prompt or messages, the options of a job. Out: an `Answer` for each, or its error.
Read `client.py` first (which answers are errors of a row, and which requests are sent again);
`limits.py` decides how many requests are open.
"""
