"""GradProbeConfig: everything that decides the result, validated when it is made.

What is *not* here: where the model and the text come from. Those are arguments of `prune_pretrained`, so that one
configuration serves many models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError

from gradprobe_hf.config.defaults import fill_in
from gradprobe_hf.config.derived import ResolvedOptions
from gradprobe_hf.config.fields import PruningOptions, named
from gradprobe_hf.config.presets import METHOD
from gradprobe_hf.config.together import BELONGS, check_together
from gradprobe_hf.config.values import check_values
from gradprobe_hf.data.text.text_options import TextOptions
from gradprobe_hf.runtime.option_checks import patterns, rounds, threshold
from gradprobe_hf.runtime.paths import looks_like_path

CONFIG_NAME = "gradprobe_config.json"


@dataclass(frozen=True, kw_only=True)
class GradProbeConfig(ResolvedOptions):
    __doc__ = PruningOptions.__doc__

    def __post_init__(self) -> None:
        self.make_plain()
        check_values({name: getattr(self, name) for name in self.defaults()}, self.defaults())
        TextOptions.of(self)  # refuses what is wrong in it
        object.__setattr__(self, "gradient_threshold", threshold(self.gradient_threshold))
        object.__setattr__(self, "rounds", rounds(self.rounds))
        for name in ("include", "exclude"):
            object.__setattr__(self, name, patterns(name, getattr(self, name)))
        fill_in(self)
        check_together(self)

    def score_alone(self) -> GradProbeConfig:
        """The same without a second probe, without steps and bounds: what proposes the candidates of all steps."""
        return self.varied(
            probes=1 if self.needs.probes and self.score_row and self.score_row.measured == "gradients" else 0,
            rule="budget",
            order="joint",
            min_matrix_sparsity=None,
            max_matrix_sparsity=None,
            preset=None,
        )

    def varied(self, **changes: Any) -> GradProbeConfig:
        """A copy with these changes.

        Options that have no effect in it any more fall back to their defaults, and a damping that was a default is
        decided anew: what serves one update is an error with another. With another preset nothing is left of what the
        earlier one came to, and of a configuration from a file, which has all of a method, nothing of that either.
        `dataclasses.replace` passes such values on as if they had been given, which with another preset is an error.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = self.given
        if changes.get("preset") and all(name in given or values[name] is None for name in METHOD):
            given -= {*METHOD, "dense_target"}  # read from a file, where what was resolved looks like what was asked
        if "preset" in changes:  # what the earlier one came to is not what was asked for
            values |= {name: None for name in METHOD if name not in given}
        elif changes.keys() & {*METHOD, "pattern"}:
            values["preset"] = None  # another method may have another name, or none
        # What says how much goes leaves nothing of what the earlier ones, or the defaults, came to.
        resolved = {"sparsity"} if any(changes.get(name) for name in ("pattern", "rounds", "structure")) else set()
        resolved |= {*METHOD} if changes.get("structure") else set()
        values |= dict.fromkeys(resolved - given)
        values = {name: value for name, value in values.items() if name not in BELONGS} | changes
        plain = GradProbeConfig(**values)
        kept = {name for name, (has_effect, _) in BELONGS.items() if has_effect(plain) and name not in changes}
        kept -= {"damping"} - self.given
        if "preset" in changes:
            kept -= {"dense_target"} - given
        found = replace(plain, **{name: getattr(self, name) for name in kept if getattr(self, name) is not None})
        object.__setattr__(found, "_given", given | named(changes))
        return found

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `gradprobe_config.json` into `directory`."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **hub_kwargs: Any) -> GradProbeConfig:
        """Read `gradprobe_config.json` from a folder or a Hub repository (`hub_kwargs`: revision, token, ...)."""
        folder = Path(name_or_path)
        path = folder / CONFIG_NAME if folder.exists() else _fetched(str(name_or_path), hub_kwargs)
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{name_or_path} has no {CONFIG_NAME}: it was not pruned with this.") from error
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return cls._of_file(path, values)


def _fetched(name: str, hub_kwargs: Mapping[str, Any]) -> str:
    """The file of a Hub repository."""
    if looks_like_path(name):
        raise FileNotFoundError(f"no such folder: {name!r}.")
    try:
        return hf_hub_download(name, CONFIG_NAME, **hub_kwargs)
    except (OSError, HFValidationError) as error:
        raise OSError(f"cannot get {CONFIG_NAME} of {name!r} from the Hub: {error}") from error


def resolve_config(config: GradProbeConfig | None) -> GradProbeConfig:
    """The configuration that was passed, or the default one.

    Raises:
        TypeError: something else was passed; the message says what makes a configuration of it.
    """
    if config is None or isinstance(config, GradProbeConfig):
        return config or GradProbeConfig()
    remedy = ""
    if isinstance(config, Mapping):
        remedy = ": GradProbeConfig.from_dict makes one of it"
    elif isinstance(config, float):
        remedy = f": GradProbeConfig(sparsity={config!r}), say"
    elif isinstance(config, (str, Path)):
        remedy = ": GradProbeConfig.from_yaml reads one from a file"
    elif config is GradProbeConfig:
        remedy = ": GradProbeConfig() is one"
    elif callable(config):
        remedy = "; a tokenizer is passed as processing_class="
    shown = config if isinstance(config, (str, Path, int, float, dict)) else type(config).__name__
    raise TypeError(f"config must be a GradProbeConfig, got {type(config).__name__} ({shown!r}){remedy}.")
