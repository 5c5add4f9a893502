"""``python -m shoal``."""

import sys

from shoal.cli import main

code = main()
processes = sys.modules.get("shoal.training.processes")
if processes is not None:
    processes.leave(code)
sys.exit(code)
