"""`python -m blockdraft` is the `blockdraft` command."""

import sys

from .trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
