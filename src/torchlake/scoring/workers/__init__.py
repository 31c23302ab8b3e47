"""What engines run to score: workers load the model once per process, and then score chunks or tables.

In: settings as plain values; chunks, tables or rows. Out: parts and reports about them; tables with predictions.
Read `chunks.py` first (it also keeps a small table in the calling process); `output.py` has the rows that a scorer
computes, `calls.py` those of a loaded model's callers.
"""
