"""Matrix statistics: what a probe keeps of one matrix.

With x_t the input and d_t the gradient of the summed loss at the output of the matrix, for token t of sequence s:

    sequence   S = sum_s (sum_{t in s} d_t x_t^T)^2            [out, in]
    token      T = sum_t (d_t^2)(x_t^2)^T                      [out, in]
    peak       G = max_s |sum_{t in s} d_t x_t^T|              [out, in]
    marginals  sum_t d_t^2 and sum_t x_t^2, whose outer product is the factored Fisher K    [out], [in]

For an embedding, `[tokens, features]`, x_t is one-hot: its rows' marginal counts tokens. Probes add to S and T;
marginals are kept per probe and per site, since a sum of outer products is not the outer product of sums. Everything
is float32, or float64 for a float64 model, unless `accumulators` are asked to be smaller; marginals always are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradprobe_hf.config import AccumulatorDevice, AccumulatorDtype
from gradprobe_hf.model.fsdp import shard_layout
from gradprobe_hf.model.parameters import execution_device
from gradprobe_hf.model.targets import Kind, Target
from gradprobe_hf.probe.accumulator_storage import PageCacheTrail
from gradprobe_hf.probe.accumulators import Accumulator
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, FOLDED_ELEMENTS, row_chunks
from gradprobe_hf.scores.evidence import MATRIX_TERMS, Term

ALL = slice(None)
REDUCED_AT_ONCE = 2**26  # elements of a matrix in one collective: most matrices are one


@dataclass(frozen=True)
class AccumulatorStorage:
    """How accumulators are kept: in which precision, on which device, and when that is the disk, in which folder.

    Attributes:
        trail: of their files, where these are more than the page cache can keep.
    """

    dtype: AccumulatorDtype = "float32"
    device: AccumulatorDevice = "same"
    folder: Path | None = None
    trail: PageCacheTrail | None = None


@dataclass
class Marginals:
    """Sums of squares along the rows and the columns of one matrix, at one site in one probe."""

    rows: Tensor | float
    columns: Tensor | float
    kind: Kind


class MatrixStatistics:
    """What is known of one matrix: an accumulator `[out, in]` for each of the matrix terms, and marginals.

    Of a sharded model the accumulators hold what this process holds of the weight, `region`; marginals are whole.
    `rows` arguments are rows of the whole matrix; by default all that are here.
    """

    def __init__(
        self,
        target: Target,
        terms: frozenset[Term],
        model: nn.Module,
        keeping: AccumulatorStorage,
        index: int,
    ) -> None:
        self.target = target
        self.layout = shard_layout(model, target.parameter)
        self.region = target.region(model)
        self.dtype = torch.promote_types(model.get_parameter(target.parameter).dtype, torch.float32)
        self.device = device = execution_device(model, target.parameter)
        self.terms = terms
        self.reached = False
        kept_on = torch.device("cpu") if keeping.device == "cpu" else device
        self.accumulators = {
            term: Accumulator(
                self.region.shape,
                keeping.dtype,
                self.dtype,
                kept_on,
                keeping.folder / f"{index:05d}.{term}" if keeping.folder is not None else None,
                keeping.trail,
            )
            for term in MATRIX_TERMS
            if term in terms
        }
        self.marginals: dict[tuple[int, int], Marginals] = {}
        self.energies: dict[int, Tensor] = {}  # site -> squared norm of d of each of this process's sequences, probe 0

    def read(self, term: Term, rows: slice = ALL) -> Tensor:
        """Rows of a matrix term, on the device of the weight."""
        assert term in self.accumulators, f"the probe did not fold {term!r}"
        return self.accumulators[term].read(self._held(rows)).to(self.device)

    def _held(self, rows: slice) -> slice:
        """Rows of the whole matrix, as rows of what is here."""
        if rows == ALL:
            return ALL
        return slice(rows.start - self.region.rows.start, rows.stop - self.region.rows.start)

    @property
    def sequence(self) -> Tensor:
        return self.read("sequence")

    @property
    def token(self) -> Tensor:
        return self.read("token")

    @property
    def peak(self) -> Tensor:
        return self.read("peak")

    def add_gradients(self, rows: slice, gradients: Iterable[Tensor]) -> None:
        """Fold the gradients of whole sequences, of these rows only: each `[rows, in]`.

        Sums that are kept in fewer bytes are taken out, added to and put back few rows at a time, which stay in the
        cache from one end to the other: for that the gradients of all sequences are there together.
        """
        if all(accumulator.kind == "float32" for accumulator in self.accumulators.values()):
            self._add(rows, gradients)
            return
        each = list(gradients)
        first, last, _ = rows.indices(self.region.shape[0])
        for part in row_chunks((last - first, self.region.shape[1]), CACHED_ELEMENTS):
            self._add(slice(first + part.start, first + part.stop), (gradient[part] for gradient in each))

    def _add(self, rows: slice, gradients: Iterable[Tensor]) -> None:
        with ExitStack() as stack:
            sums = stack.enter_context(self._updating("sequence", rows))
            peaks = stack.enter_context(self._updating("peak", rows))
            self._fold(gradients, sums, peaks)

    def _fold(self, gradients: Iterable[Tensor], sums: Tensor | None, peaks: Tensor | None) -> None:
        for gradient in gradients:
            gradient = gradient.to(self.dtype)
            if sums is not None:
                sums.addcmul_(gradient, gradient)
            if peaks is not None:
                torch.maximum(peaks, gradient.abs(), out=peaks)

    @contextmanager
    def _updating(self, term: Term, rows: slice) -> Iterator[Tensor | None]:
        if term not in self.accumulators:
            yield None
            return
        with self.accumulators[term].updating(rows, self.device) as values:
            yield values

    def add_shared_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Fold the gradients `[out, in]` of whole sequences into the shards of all processes. A collective."""
        assert self.layout is not None, "for a sharded matrix"
        sums, peaks = (
            torch.zeros(self.target.shape, dtype=self.dtype, device=self.device) if term in self.accumulators else None
            for term in ("sequence", "peak")
        )
        self._fold(gradients, sums, peaks)
        if sums is not None:
            self._add_shared("sequence", sums)
        if peaks is not None:
            self._add_shared("peak", peaks)

    def add_shared_products(self, rows_sq: Tensor, columns_sq: Tensor) -> None:
        """Fold the token term into the shards of all processes. A collective."""
        self._add_shared("token", rows_sq.t() @ columns_sq)

    def _add_shared(self, term: Term, full: Tensor) -> None:
        assert self.layout is not None, "for a sharded matrix"
        stored = full.t().contiguous() if self.target.transposed else full
        own = self.layout.reduce(stored, "max" if term == "peak" else "sum")
        own = own.t() if self.target.transposed else own
        for rows in row_chunks(self.region.shape, FOLDED_ELEMENTS) if own.numel() else ():
            with self.accumulators[term].updating(rows, self.device) as values:
                torch.maximum(values, own[rows], out=values) if term == "peak" else values.add_(own[rows])

    def add_products(self, rows: slice, rows_sq: Tensor, columns_sq: Tensor) -> None:
        """Fold the token term of these rows: `rows_sq [tokens, rows]`, `columns_sq [tokens, in]`."""
        with self.accumulators["token"].updating(rows, self.device) as values:
            values.addmm_(rows_sq.t(), columns_sq)

    def add_tokens(self, ids: Tensor, squares: Tensor) -> None:
        """Fold the token term of an embedding: `ids [tokens]`, `squares [tokens, features]`."""
        if self.layout is not None:
            full = torch.zeros(self.target.shape, dtype=self.dtype, device=self.device)
            self._add_shared("token", full.index_add_(0, ids, squares))
            return
        with self.accumulators["token"].updating(ALL, self.device) as values:
            values.index_add_(0, ids, squares)

    def keep_energies(self, site: int, first: int, energies: Tensor) -> None:
        """Remember `energies [sequences]` of the sequences from number `first` on; added where a site is used again."""
        kept = self.energies.get(site, energies[:0])
        missing = first + len(energies) - len(kept)
        if missing > 0:
            kept = torch.cat([kept, kept.new_zeros(missing)])
        kept[first : first + len(energies)] += energies
        self.energies[site] = kept

    def limiting(self, site: int, first: int, energies: Tensor, limit: float) -> Tensor:
        """What to multiply d by, `[sequences]`, so that its energy is at most `limit` times what was remembered.

        Where nothing was, a sequence that a router sent elsewhere, there is nothing to compare with: 1.
        """
        before = self.energies.get(site, energies[:0])[first : first + len(energies)]
        before = torch.nn.functional.pad(before, (0, len(energies) - len(before)))
        return (limit * before / energies).sqrt().clamp(max=1).where((before > 0) & (energies > 0), 1.0)

    def add_marginals(self, probe: int, site: int, kind: Kind, rows: Tensor | float, columns: Tensor | float) -> None:
        kept = self.marginals.setdefault((probe, site), Marginals(0.0, 0.0, kind))
        kept.rows = kept.rows + rows
        kept.columns = kept.columns + columns

    def reduce(self, processes: Processes, probe: int, reached: bool) -> None:
        self.reached = reached
        for term, accumulator in self.accumulators.items() if self.layout is None else ():
            for rows in row_chunks(accumulator.shape, elements=REDUCED_AT_ONCE):
                with accumulator.updating(rows, self.device) as values:
                    (processes.max_ if term == "peak" else processes.sum_)(values)
        if "marginals" in self.terms and reached:
            self._reduce_marginals(processes, probe)

    def _reduce_marginals(self, processes: Processes, probe: int) -> None:
        """A site that only other processes have seen (an expert) has marginals there and none here."""
        for index, site in enumerate(self.target.sites):
            kept = self.marginals.setdefault((probe, index), Marginals(0.0, 0.0, site.kind))
            sides = []
            for side, size in ((kept.rows, self.target.shape[0]), (kept.columns, self.target.shape[1])):
                empty = torch.zeros(size, dtype=self.dtype, device=self.device)
                sides.append(side if isinstance(side, Tensor) else empty)
            both = processes.sum_(torch.cat(sides))
            kept.rows, kept.columns = both.split(list(self.target.shape))

    def state(self) -> dict[str, Tensor]:
        found = {
            f"{term}.{name}": part
            for term, accumulator in self.accumulators.items()
            for name, part in accumulator.parts().items()
        }
        for (probe, site), kept in self.marginals.items():
            for side, value in (("rows", kept.rows), ("columns", kept.columns)):
                found[f"marginals.{probe}.{site}.{side}"] = torch.as_tensor(value, dtype=self.dtype)
        return found | {f"energies.{site}": energies for site, energies in self.energies.items()}

    def load_state(self, tensors: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        for term, accumulator in self.accumulators.items():
            accumulator.restore({name: tensors[f"{term}.{name}"] for name in accumulator.parts()})
            accumulator.updates = updates[term]
        self.marginals.clear()
        self.energies.clear()
        for name, value in tensors.items():
            if name.startswith("energies."):
                self.energies[int(name.split(".")[1])] = value.to(self.device, copy=True)
            if name.startswith("marginals."):
                _, probe, site, side = name.split(".")
                kind = self.target.sites[int(site)].kind
                kept = self.marginals.setdefault((int(probe), int(site)), Marginals(0.0, 0.0, kind))
                setattr(kept, side, value.to(self.device, copy=True) if value.ndim else float(value))

    def factored(self, rows: slice = ALL) -> Tensor:
        """The factored Fisher K, `[out, in]`, summed over probes and sites: one product of thin matrices."""
        rows = self.region.rows if rows == ALL else rows
        left = torch.stack([torch.as_tensor(kept.rows)[rows] for kept in self.marginals.values()], dim=1)
        columns = [torch.as_tensor(kept.columns)[self.region.columns] for kept in self.marginals.values()]
        right = torch.stack(columns, dim=0)
        return left @ right

    def input_sq(self, rows: slice = ALL) -> Tensor:
        """Sum of each input squared in the first probe, broadcastable to `[out, in]`."""
        first = [kept for (probe, _), kept in self.marginals.items() if probe == 0]
        return sum(  # type: ignore[return-value]  # never empty: asked for reached matrices only
            torch.as_tensor(kept.rows)[self.region.rows if rows == ALL else rows, None]
            if kept.kind == "embedding"
            else torch.as_tensor(kept.columns)[None, self.region.columns]
            for kept in first
        )
