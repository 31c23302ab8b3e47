"""`python -m torchlake`: the command line, where the console script is not on the path."""

import sys

from torchlake.cli.main import main

sys.exit(main())
