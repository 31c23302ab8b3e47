"""The command line: `torchlake COMMAND`.

In: the words of a command. Out: results on standard output, everything else on standard error, an exit status.
Read `main.py` first (parse, work, print); `app.py` declares the commands, `commands.py` does their work.
"""
