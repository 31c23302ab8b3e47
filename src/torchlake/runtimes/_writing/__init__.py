"""Writers: prompts in, answers out, a token of every row per step.

In: a model on its device, prompts (token ids), the options of each row. Out: answers as token ids, as they end.
Read `row.py` first: what is known of a row, and when it ends; then `choosing.py`: which token comes next; `static.py`:
transformers' `generate`, batch after batch; `session.py`: rows take the places of those that have ended.
"""
