"""What written texts have to fit: a JSON schema, a regular expression, a list of choices, or a grammar.

In: the options of `predict`, and a model folder's tokenizer. Out: grammars that llguidance compiles, checked before a
model is loaded. Read `structure.py` first, which makes grammars; `runtimes/_writing/grammar.py` applies them to each
token.
"""
