"""Spikes: single sequences whose gradient explodes in the shrunk model, and the limit on what they add.

In a model that is shrunk far, one sequence in many has a gradient that grows from block to block, up to a hundred
thousand times the others': sums of squares would be about this sequence alone. The reference is the model as it was.
With E_0 the energy `sum_t ||d_t||^2` of a sequence's output gradients at a matrix in probe 0, and E_1 that in probe 1,
d is scaled by `min(1, sqrt(limit * E_0 / E_1))`: its energy is then at most `limit` times what it was. A matrix that is
used several times in a pass (ALBERT's, by every layer) has energies of each use, or a first use would be compared with
all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

Use = tuple[int, int]  # number of the site, and of its uses in a pass: backward comes to the last of them first


class SequenceEnergies:
    """Energies of this process's sequences at the uses of one matrix in probe 0: `[sequences]` each."""

    def __init__(self) -> None:
        self._of_use: dict[Use, Tensor] = {}

    def add(self, use: Use, first: int, energies: Tensor) -> None:
        """Add `energies [sequences]` of the sequences from number `first` on."""
        known = self._of_use.get(use, energies[:0])  # grown as sequences come: their number is not known before
        missing = first + len(energies) - len(known)
        if missing > 0:
            known = torch.cat([known, known.new_zeros(missing)])
        known[first : first + len(energies)] += energies
        self._of_use[use] = known

    def scale(self, use: Use, first: int, energies: Tensor, limit: float) -> Tensor:
        """What to multiply d by, `[sequences]`, so that its energy is at most `limit` times that of probe 0.

        1 for a sequence without an energy in probe 0: a router has sent it to another expert there.

        >>> known = SequenceEnergies()
        >>> known.add((0, 0), 0, torch.tensor([1.0, 1.0, 0.0]))
        >>> known.scale((0, 0), 0, torch.tensor([2.0, 400.0, 5.0]), limit=4)
        tensor([1.0000, 0.1000, 1.0000])
        """
        before = self._of_use.get(use, energies[:0])[first : first + len(energies)]
        before = torch.nn.functional.pad(before, (0, len(energies) - len(before)))
        # `where` also replaces the infinities and NaN of a division by zero.
        return (limit * before / energies).sqrt().clamp(max=1).where((before > 0) & (energies > 0), 1.0)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for (site, number), energies in self._of_use.items():
            yield f"energies.{site}.{number}", energies

    def load_state(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Replace everything by the `energies.*` of a saved state."""
        self._of_use.clear()
        for name, value in tensors.items():
            if name.startswith("energies."):
                _, site, number = name.split(".")
                self._of_use[int(site), int(number)] = value.to(device, copy=True)
