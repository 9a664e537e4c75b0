"""Flags: an error about an option, said as the option is typed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from gradprobe_hf.runtime.names_elsewhere import PRUNING, RECOVERY

# Arguments of the functions that are called otherwise here.
_CALLED = {
    "model_or_id": "MODEL",
    "pruned": "MODEL",
    "output_dir": "--output",
    "hub_private_repo": "--private",
    "config": "--config",
    # What is known of the others' names ends at an argument that a command does not have.
    "processing_class": "MODEL",
    "loss_fn": "loss_fn (in Python)",
    "metric_fn": "metric_fn (in Python)",
}


def flag(name: str) -> str:
    """An option or argument, as it is typed.

    >>> flag("num_samples"), flag("output_dir")
    ('--num-samples', '--output')
    """
    return _CALLED.get(name, f"--{name.replace('_', '-')}")


def unknown_flag(text: str, flags: Collection[str]) -> str:
    """What to say of a word on the command line that nothing takes.

    >>> unknown_flag("--amount", ["--sparsity"])
    'there is no option --amount; it is --sparsity here.'
    >>> unknown_flag("--spars", ["--sparsity"])
    'there is no option --spars; did you mean --sparsity?'
    """
    if not text.startswith("-"):
        return (
            f"{text!r} is one argument too many: quote what has spaces, write a list as a,b, and give --include and "
            "--exclude once for each pattern."
        )
    typed = text.split("=")[0]
    name = typed.lstrip("-").replace("-", "_")
    known = [one.options.get(name) or one.arguments.get(name) for one in (PRUNING, RECOVERY)]
    for found in [flag(meant or name) for meant in known]:
        if found in flags or found == "MODEL":
            return f"there is no option {typed}; it is {found} here."
    longer = [one for one in flags if one.startswith(typed) and len(typed) > 3]
    meant = longer or difflib.get_close_matches(typed.replace("_", "-"), flags, n=1)
    return f"there is no option {typed}" + (f"; did you mean {meant[0]}?" if meant else ".")


def in_flags(message: str, names: Collection[str]) -> str:
    """A message in the words of the functions, in those of the command line.

    Args:
        names: of options. Some are plain words too: these are left alone, but where it can only be the option.

    >>> in_flags("score='fisher' needs a probe: set probes=1, got probes=0.", ["score", "probes"])
    '--score fisher needs a probe: set --probes 1, got --probes 0.'
    >>> in_flags("sparsity must be a fraction. Choose another resume_dir (--resume-dir).", ["sparsity", "resume_dir"])
    '--sparsity must be a fraction. Choose another --resume-dir.'
    >>> in_flags("structure={'ffn': 704, 'blocks': 4} is the nearest, or structure={'ffn': ...}.", ["structure"])
    '--structure ffn=704,blocks=4 is the nearest, or --structure ffn=....'
    >>> in_flags("Give batches with labels, or a loss_fn; score='wanda' needs no loss.", ["score"])
    'Give batches with labels, or a loss_fn (in Python); --score wanda needs no loss.'
    """
    known = "|".join(sorted(map(re.escape, {*names, *_CALLED}), key=len, reverse=True))
    long = "|".join(name for name in known.split("|") if "_" in name) or "(?!)"
    bare = r"(?<![\w./'\"-])"
    # What says both already.
    message = re.sub(rf"{bare}(?:{known})(?:=({_VALUE}))? \((--[^)]*)\)", _spelled_twice, message)
    message = re.sub(rf"{bare}({known})=({_VALUE})", _with_value, message)
    message = re.sub(rf"^({known})(?= must| pattern| names|\[)", _alone, message)
    message = re.sub(rf"(?<=[Ll]eave )({known})(?= unset| out)", _alone, message)
    return re.sub(rf"{bare}({long})(?![\w'\"=-]|\.\w|/)", _alone, message)


def _spelled_twice(found: re.Match[str]) -> str:
    return f"{found[2]} {found[1]}" if found[1] and " " not in found[2] and found[1] != "True" else found[2]


def _alone(found: re.Match[str]) -> str:
    return flag(found[1])


def _with_value(found: re.Match[str]) -> str:
    return f"{flag(found[1])} {_typed(found[2])}".rstrip()


# A value as Python shows it: quoted, in brackets, or a bare word that does not end in punctuation.
_VALUE = r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\[[^]]*\]|\{[^}]*\}|[\w.+-]*[\w%]"


def _typed(value: str) -> str:
    """`'2:4'` is typed 2:4, `['q_proj']` q_proj, `{'ffn': 7}` ffn=7, `(0.2, 0.5)` 0.2,0.5; True is the flag alone."""
    if value in ("True", "False"):
        return ""
    if re.fullmatch(r"\{('\w+': [^,]+(, )?)+\}", value):
        return re.sub(r"'([^']*)': ", r"\1=", value[1:-1]).replace(", ", ",")
    if value[0] in "([" and value[-1] in ")]":
        return ",".join(_typed(part.strip()) for part in value[1:-1].split(",") if part.strip())
    if value[0] in "'\"" and not re.search(r"[\s'\"]", value[1:-1]) and len(value) > 2:
        return value[1:-1]
    return value
