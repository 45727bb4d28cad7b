"""``python -m xmesh``: the command line."""

import sys

from xmesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
