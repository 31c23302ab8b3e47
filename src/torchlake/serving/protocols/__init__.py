"""The routes that answer with the model, in the forms of the servers whose clients call them.

In: the body of a request (`ServedRequest`). Out: a response, or a refusal. Read `rows.py` first, then `texts.py`.
"""
