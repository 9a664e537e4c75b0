"""`python -m gradprobe_hf` is `gradprobe`."""

import sys

from gradprobe_hf.cli import main

sys.exit(main())
