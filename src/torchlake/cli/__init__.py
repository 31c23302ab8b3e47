"""The command line: `torchlake COMMAND`.

In: the words of a command. Out: results on standard output, everything else on standard error, an exit status (its
numbers are in `errors.py`; 141, a closed pipe, in `console.py`). Read `main.py` first (parse, work, print), then
`commands/`, which declares the commands and does their work. `streams.py` is about standard streams that are closed or
full. Options that Python has, too, are declared in `config/options.py`.
"""
