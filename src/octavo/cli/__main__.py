"""`python -m octavo.cli` is `octavo`."""

import sys

from octavo.cli.main import main

sys.exit(main())
