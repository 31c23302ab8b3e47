"""The command line: `torchlake COMMAND`.

In: the words of a command. Out: results on standard output, everything else on standard error, an exit status.
Read `main.py` first (parse, work, print), then `commands/`, which declares the commands and does their work.
"""
