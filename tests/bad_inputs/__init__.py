"""Bad inputs, one line each: how it is called, and what the error must name.

`tests/test_bad_inputs.py` runs them all in one process. A command is run by `main`; a call is a Python expression in
which the names of `world.py` are known. `@name` is a file or folder of the world, and the working folder is empty.
"""

from __future__ import annotations

from tests.bad_inputs.case import Bad
from tests.bad_inputs.checkpoints import CHECKPOINTS
from tests.bad_inputs.methods import METHODS
from tests.bad_inputs.options import OPTIONS
from tests.bad_inputs.python import PYTHON
from tests.bad_inputs.recipes import RECIPES
from tests.bad_inputs.texts import TEXTS
from tests.bad_inputs.training import TRAINING
from tests.bad_inputs.verbs import VERBS

ALL: list[Bad] = [*OPTIONS, *METHODS, *CHECKPOINTS, *TEXTS, *VERBS, *RECIPES, *PYTHON, *TRAINING]
