"""The next choice: what the next better and the next faster preset took where they were measured.

From benchmarks/results/wikitext.json, which `make bench-wikitext` writes: SmolLM2-135M-Instruct at 60%, and at 2:4 in
the place of every n:m pattern. What lies beyond the presets is from refined.json beside it (`make bench-refined`). A
test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradprobe_hf.config.config import GradProbeConfig
from gradprobe_hf.config.presets import METHOD, Preset

MEASURED_ON = "SmolLM2-135M-Instruct"
CLEARLY_FASTER = 0.75  # of the time; less of a difference is no reason to change


@dataclass(frozen=True)
class Price:
    """Attributes: `seconds` of a run on one core; `perplexity`, the geometric mean of WikiText-2's and pydoc's."""

    seconds: float
    perplexity: float


PRICES: dict[Preset, Price] = {
    "fast": Price(144.2, 50.08),
    "balanced": Price(278.2, 45.24),
    "best": Price(392.4, 32.04),
}
PRICES_IN_GROUPS: dict[Preset, Price] = {
    "fast": Price(134.2, 60.52),
    "balanced": Price(249.2, 47.79),
    "best": Price(439.5, 45.69),
}

# Training behind `best`: the option -> the ratio of the perplexities. Its seconds were a busy machine's.
BEYOND = {"recovery_steps=100": 0.86, "refinement='blocks'": 0.91}
BEYOND_IN_GROUPS = {"recovery_steps=100": 0.75, "refinement='blocks'": 0.81}


def next_choices(config: GradProbeConfig, is_language_model: bool = True) -> list[str]:
    """A sentence for what is better, and one for the best preset that is clearly faster, where there are such.

    What is better is the best preset, and beyond that training. What is no preset as it is has no measured price here,
    so nothing is said about it.

    Args:
        is_language_model: what the training and the perplexities are of. Another model is trained as its user trains
            it, and what a preset costs it is not known: only the faster one is named, with its time.
    """
    prices = PRICES if config.group is None else PRICES_IN_GROUPS
    own = next((preset for preset in prices if _is(config, preset)), None)
    if own is None:
        return []
    better = min(prices, key=lambda preset: prices[preset].perplexity)
    quick = [preset for preset in prices if prices[preset].seconds <= CLEARLY_FASTER * prices[own].seconds]
    faster = min(quick, key=lambda preset: prices[preset].perplexity, default=own)
    at = "60%" if config.group is None else "2:4"
    if not is_language_model:
        seconds = prices[faster].seconds / prices[own].seconds
        return [f"faster: preset {faster} ({seconds:.2g}x the time on {MEASURED_ON})"] * (faster != own)
    trained = BEYOND if config.group is None else BEYOND_IN_GROUPS
    further = [
        f"better: {one} ({ratio:.2f}x the perplexity on {MEASURED_ON} at {at})" for one, ratio in trained.items()
    ]
    return further * (better == own) + [
        f"{word}: preset {other} ({prices[other].seconds / prices[own].seconds:.2g}x the time, "
        f"{prices[other].perplexity / prices[own].perplexity:.2f}x the perplexity on {MEASURED_ON} at {at})"
        for word, other in (("better", better), ("faster", faster))
        if other != own
    ]


def _is(config: GradProbeConfig, preset: Preset) -> bool:
    plain = GradProbeConfig(preset=preset, pattern=config.pattern)
    if config.refines or config.recovery_steps:
        return False
    return config.order == "joint" and all(getattr(config, name) == getattr(plain, name) for name in METHOD)
