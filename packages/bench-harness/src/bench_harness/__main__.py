"""``python -m bench_harness``: the command line without an installed script."""

import sys

from bench_harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
