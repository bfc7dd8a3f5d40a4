"""`python -m narrowgauge.cli`, the same as the `narrowgauge` command."""

import sys

from narrowgauge.cli import main

sys.exit(main())
