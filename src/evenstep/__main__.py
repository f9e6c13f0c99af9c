"""`python -m evenstep` is the command `evenstep`, also where scripts are not on the path."""

from __future__ import annotations

import sys

from evenstep.cli import main

sys.exit(main())
