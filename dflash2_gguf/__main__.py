"""``python -m dflash2_gguf`` is ``dflash2-run``."""

from __future__ import annotations

import sys

from dflash2_gguf.cli import main

if __name__ == "__main__":
    sys.exit(main())
