"""Read, check and write model folders, and add the head for a task.

In: a folder in Hugging Face's layout. Out: a model, a tokenizer, a `TaskSpec`; and new folders.
Read `load.py` first; `safety.py` refuses folders that could run code.
"""
