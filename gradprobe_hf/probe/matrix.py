"""Matrix statistics: what the probes measure of one matrix.

The table of terms (`scores/terms.py`) has the formulas of those that are matrices, `[out, in]`; beside them there are

    marginals  sum_t d_t^2 and sum_t x_t^2, see `marginals.py` [out], [in]
    gates      of units of its inputs, see `gates.py`          [units]
    energies   of the sequences in probe 0, see `spikes.py`    [sequences]

For an embedding, `[tokens, features]`, x_t is one-hot. Both probes of a pair add to the same sums, unless
a decision keeps them apart. These are float32, or float64 for a float64 model; accumulators may store them in fewer
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from gradprobe_hf.model.fsdp import shard_layout
from gradprobe_hf.model.parameters import execution_device
from gradprobe_hf.model.targets import Region, Target
from gradprobe_hf.probe.accumulation.accumulators import Accumulator
from gradprobe_hf.probe.accumulation.storage import AccumulatorStorage
from gradprobe_hf.probe.gates import GateSums
from gradprobe_hf.probe.marginals import Marginals
from gradprobe_hf.probe.spikes import SequenceEnergies
from gradprobe_hf.runtime.processes import Processes
from gradprobe_hf.runtime.row_chunks import CACHED_ELEMENTS, FOLDED_ELEMENTS, row_chunks
from gradprobe_hf.scores.terms import GATES, MARGINALS, Term, matrix_terms

ALL = slice(None)
REDUCED_AT_ONCE = 2**26  # elements in one collective: most matrices take one, and its buffer stays below 256 MB


class MatrixStatistics:
    """An accumulator `[out, in]` for each of the matrix terms, marginals, and gates.

    Of a sharded matrix the accumulators cover `region`, the rows and columns that this process holds; marginals are
    whole. `rows` arguments are rows of the whole matrix; `ALL` stands for those that are here.

    Args:
        index: number of the matrix, for file names.
        units: of its inputs, that have a gate each.
    """

    def __init__(
        self,
        target: Target,
        terms: frozenset[Term],
        model: nn.Module,
        storage: AccumulatorStorage,
        index: int,
        units: int = 0,
    ) -> None:
        self.target, self.terms = target, terms
        self.shards = shard_layout(model, target.parameter)
        self.region = target.region(model)
        self.dtype = torch.promote_types(model.get_parameter(target.parameter).dtype, torch.float32)
        self.device = execution_device(model, target.parameter)
        self.reached = False  # whether the loss depends on the matrix, for all that is known
        self._rows = matrix_terms(terms)  # of the table
        self._folds = {term: row.fold for term, row in self._rows.items() if row.fold is not None}
        self._of_tokens = [term for term, row in self._rows.items() if row.is_of_tokens]
        self.accumulators = {
            # File names by number: a target's name may hold what a file name cannot.
            term: Accumulator(self.region.shape, self.dtype, self.device, storage, f"{index:05d}.{term}")
            for term in self._rows
        }
        self.marginals = Marginals(target, self.dtype, self.device)
        self.gates = GateSums(units, self.dtype, self.device)
        self.energies = SequenceEnergies()

    def read(self, term: Term, rows: slice = ALL) -> Tensor:
        """Rows of a matrix term, on the device of the matrix; read-only."""
        assert term in self.accumulators, f"the probe did not fold {term!r}"
        if rows != ALL:
            rows = slice(rows.start - self.region.rows.start, rows.stop - self.region.rows.start)
        return self.accumulators[term].read(rows).to(self.device)

    @property
    def folds_gradients(self) -> bool:
        """Whether a term is made of the gradients of sequences."""
        return bool(self._folds)

    @property
    def folds_tokens(self) -> bool:
        """Whether a term is made of the squares of tokens."""
        return bool(self._of_tokens)

    def factored(self, rows: slice = ALL) -> Tensor:
        """Rows of the factored Fisher K, `[rows, in]`."""
        return self.marginals.factored(self._region_of(rows))

    def input_sq(self, rows: slice = ALL) -> Tensor:
        """Sum of each input squared in probe 0, broadcastable to `[rows, in]`."""
        return self.marginals.input_sq(self._region_of(rows))

    def _region_of(self, rows: slice) -> Region:
        return self.region if rows == ALL else Region(rows, self.region.columns)

    def add_gradients(self, rows: slice, gradients: Iterable[Tensor]) -> None:
        """Fold gradients of whole sequences, `[rows, in]` each, into the terms of these."""
        if all(accumulator.kind == "float32" for accumulator in self.accumulators.values()):
            self._add(rows, gradients)
            return
        # Reduced precision is decoded, added to and rounded again. A few rows at a time stay in the cache from one end
        # to the other, but only if all sequences are added before the rounding: so all gradients are kept meanwhile.
        each = list(gradients)
        first, last, _ = rows.indices(self.region.shape[0])
        for part in row_chunks((last - first, self.region.shape[1]), CACHED_ELEMENTS):
            self._add(slice(first + part.start, first + part.stop), (gradient[part] for gradient in each))

    def _add(self, rows: slice, gradients: Iterable[Tensor]) -> None:
        with ExitStack() as stack:
            into = {
                term: stack.enter_context(self.accumulators[term].updating(rows, self.device)) for term in self._folds
            }
            self._fold(gradients, into)

    def _fold(self, gradients: Iterable[Tensor], into: Mapping[Term, Tensor]) -> None:
        for gradient in gradients:
            gradient = gradient.to(self.dtype)
            for term, fold in self._folds.items():
                fold(into[term], gradient)

    def add_products(self, rows: slice, rows_sq: Tensor, columns_sq: Tensor) -> None:
        """Fold the squares of these rows: `rows_sq [tokens, rows]`, `columns_sq [tokens, in]`."""
        for term in self._of_tokens:
            with self.accumulators[term].updating(rows, self.device) as values:
                values.addmm_(rows_sq.t(), columns_sq)

    def add_tokens(self, ids: Tensor, squares: Tensor) -> None:
        """Fold the squares of an embedding: `ids [tokens]`, `squares [tokens, features]`."""
        for term in self._of_tokens:
            if self.shards is not None:
                full = torch.zeros(self.target.shape, dtype=self.dtype, device=self.device)
                self._add_to_shards(term, full.index_add_(0, ids, squares))
                continue
            with self.accumulators[term].updating(ALL, self.device) as values:
                values.index_add_(0, ids, squares)

    def add_gradients_to_shards(self, gradients: Iterable[Tensor]) -> None:
        """Fold the gradients `[out, in]` of this process's sequences into the shards of all processes. A collective."""
        # Squared and summed here first: one reduction a batch, however many sequences it has.
        of_batch = {term: torch.zeros(self.target.shape, dtype=self.dtype, device=self.device) for term in self._folds}
        self._fold(gradients, of_batch)
        for term, values in of_batch.items():
            self._add_to_shards(term, values)

    def add_products_to_shards(self, rows_sq: Tensor, columns_sq: Tensor) -> None:
        """Fold squares into the shards of all processes. A collective."""
        for term in self._of_tokens:
            self._add_to_shards(term, rows_sq.t() @ columns_sq)

    def _add_to_shards(self, term: Term, full: Tensor) -> None:
        assert self.shards is not None, "for a sharded matrix"
        # The layout is the parameter's: its first dimension is sharded, which is `in` where it stores `[in, out]`.
        stored = full.t().contiguous() if self.target.transposed else full
        own = self.shards.reduce(stored, self._rows[term].merging)
        own = own.t() if self.target.transposed else own
        for rows in row_chunks(self.region.shape, FOLDED_ELEMENTS) if own.numel() else ():  # a shard may be empty
            with self.accumulators[term].updating(rows, self.device) as values:
                self._rows[term].merge_(values, own[rows])

    def reduce(self, processes: Processes, probe: int, reached: bool) -> None:
        """Make the sums those of all processes. Collectives; shards are reduced batch by batch already.

        Args:
            reached: whether any process has reached the matrix: all of them have to join the same collectives.
        """
        self.reached = reached
        for term, accumulator in self.accumulators.items() if self.shards is None else ():
            for rows in row_chunks(accumulator.shape, elements=REDUCED_AT_ONCE):
                with accumulator.updating(rows, self.device) as values:
                    (processes.max_ if self._rows[term].merging == "max" else processes.sum_)(values)
        if MARGINALS in self.terms and reached:
            self.marginals.reduce(processes, probe)
        if GATES in self.terms:
            self.gates.reduce(processes)

    def state(self) -> dict[str, Tensor]:
        """Every tensor, as it is stored, by name."""
        return {
            **{
                f"{term}.{name}": part
                for term, accumulator in self.accumulators.items()
                for name, part in accumulator.parts().items()
            },
            **dict(self.marginals.state()),
            **(dict(self.gates.state()) if GATES in self.terms else {}),
            **dict(self.energies.state()),
        }

    def load_state(self, tensors: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Become what `state` was taken of; `updates` are those of each accumulator."""
        for term, accumulator in self.accumulators.items():
            accumulator.restore({name: tensors[f"{term}.{name}"] for name in accumulator.parts()})
            accumulator.updates = updates[term]
        self.marginals.load_state(tensors)
        if GATES in self.terms:
            self.gates.load_state(tensors)
        self.energies.load_state(tensors, self.device)
