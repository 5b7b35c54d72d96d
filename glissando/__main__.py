"""`python -m glissando`: the program, where its script is not on the path."""

from __future__ import annotations

import sys

from glissando.cli import main

sys.exit(main())
