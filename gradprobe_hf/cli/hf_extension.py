"""`hf-gradprobe`: the same command under the name that makes it an extension of the Hub's own command line.

`hf` runs what is installed with `hf extensions install`, or what stands in its folder of extensions already:
`hf-gradprobe --register` puts this installation there, and `hf gradprobe ...` works from then on.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gradprobe_hf.cli.main import main

NAME = "gradprobe"
COMMAND = f"hf-{NAME}"


def extension_main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--register"]:
        print(f"`hf {NAME}` now runs {register()}")
        return 0
    return main(given)


def register() -> Path:
    """Write the manifest `hf` looks for (huggingface_hub/cli/extensions.py); returns the command it names."""
    from huggingface_hub.cli.extensions import EXTENSIONS_ROOT, ExtensionManifest

    command = shutil.which(sys.argv[0]) or shutil.which(COMMAND)
    if command is None:
        raise SystemExit(f"{COMMAND} is not on the PATH; install the package first.")
    ExtensionManifest(
        owner="local",
        repo=COMMAND,
        repo_id=f"local/{COMMAND}",
        short_name=NAME,
        executable_path=str(Path(command).absolute()),
        type="python",
        installed_at=datetime.now(UTC),
        description="Prune transformers using gradients of their loss",
    ).save(EXTENSIONS_ROOT.expanduser() / COMMAND)
    return Path(command).absolute()
