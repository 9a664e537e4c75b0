"""Footprint: what is in memory and on disk at each stage of a run, item by item. Arithmetic, in bytes.

A run's highest point is that of its highest stage: `load` has the file that is read, `write` the keys and values of
text that the model writes, `probe` a batch's activations beside the statistics, `weigh` the Hessians that tell which
structures go, `decide` two sets of masks, `reconstruct` the new weights and a block's Hessians, `measure` the logits of
two models, `recover` a second model and its optimizer, and `save` the originals of pruned weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from gradprobe_hf.config.values import PLACES
from gradprobe_hf.estimation.sizes import FLOAT32_BYTES, BatchSizes, ReconstructionSizes, Sizes, TrainingSizes
from gradprobe_hf.model.files.saving import LARGEST_SHARD, SHARDS, SMALLEST_SHARD
from gradprobe_hf.runtime.row_chunks import FOLDED_ELEMENTS

Device = Literal["host", "accelerator", "disk"]
PlacementName = Literal["resident", "checkpointed", "offloaded"]

DEVICES: tuple[Device, ...] = get_args(Device)
WEIGHTS = "weights"  # the label of their item

WEIGHTS_PER_MASK_BYTE = 8
# Folding and selection go through a matrix in chunks of rows, with about this many float32 temporaries of one chunk.
CHUNK_TENSORS = 6
# A fast tokenizer maps each token to its text, the text back, and its merges: measured with SmolLM2's.
TOKENIZER_BYTES_PER_TOKEN = 1000
# Pages of the libraries that a run touches first, and the calibration text with its tokens: measured with "pydoc".
FIRST_USE_BYTES = 50 * 10**6
# What CUDA adds: its context and libraries to the process, and on the device a workspace of cuBLAS for each of the two
# threads that multiply, forward and backward. Measured with the model of 15M on an H100 (torch 2.11), which has the
# largest workspaces.
CUDA_PROCESS_BYTES = 1050 * 10**6
CUDA_WORKSPACES_BYTES = 2 * 32 * 2**20
# glibc takes blocks below 32 MiB from a heap that grows and shrinks at its end alone. In a forward pass temporaries and
# activations alternate there: temporaries that are freed leave holes between activations that backward needs, and the
# holes stay resident. As a fraction of the blocks that are alive, measured with SmolLM2; there are no holes under
# MALLOC_MMAP_THRESHOLD_=65536, because then every block is mapped and unmapped by itself.
HEAP_HOLES = 0.4


@dataclass(frozen=True)
class Item:
    """Something that takes memory. A `reclaimable` one, a mapped file, counts in a peak but always makes room."""

    label: str
    device: Device
    bytes: int
    reclaimable: bool = False


@dataclass(frozen=True)
class Stage:
    """What is there at the same time."""

    name: str
    items: tuple[Item, ...]

    def bytes_on(self, device: Device, needed: bool = False) -> int:
        """The sum on a device; with `needed` without what can make room."""
        return sum(item.bytes for item in self.items if item.device == device and not (needed and item.reclaimable))


@dataclass(frozen=True)
class Placement:
    """One way to hold the model.

    Attributes:
        stages: in order.
        room: free bytes of each device that the run uses.
    """

    name: PlacementName
    stages: tuple[Stage, ...]
    room: dict[Device, int]

    def peak_stage(self, device: Device) -> Stage:
        return max(self.stages, key=lambda stage: stage.bytes_on(device))

    def peak(self, device: Device) -> int:
        return self.peak_stage(device).bytes_on(device)

    def needed(self, device: Device) -> int:
        """The least memory, in bytes, that the run can do with."""
        return max(stage.bytes_on(device, needed=True) for stage in self.stages)

    def beside_weights(self, device: Device) -> int:
        """What the run takes of a device besides the weights that are there, and what can make room."""
        return max(
            sum(
                one.bytes
                for one in stage.items
                if one.device == device and not one.reclaimable and one.label != WEIGHTS
            )
            for stage in self.stages
        )

    @property
    def fits(self) -> bool:
        return all(self.needed(device) <= free for device, free in self.room.items())

    def to_dict(self) -> dict[str, Any]:
        stages = {stage.name: [asdict(item) for item in stage.items] for stage in self.stages}
        peaks = {device: self.peak(device) for device in self.room}
        return {"name": self.name, "fits": self.fits, "peak_bytes": peaks, "room_bytes": self.room, "stages": stages}


def footprint_of(name: PlacementName, sizes: Sizes, batch: BatchSizes, room: dict[Device, int]) -> Placement:
    """The footprint of one placement. Statistics that go where there is room are in the first place that fits.

    Args:
        room: free bytes of each device; a model computes on the accelerator where there is one.
    """
    if sizes.accumulators.device != "auto":
        return _footprint(name, sizes, batch, room)
    places = [replace(sizes.accumulators, device=place) for place in PLACES]
    found = [_footprint(name, replace(sizes, accumulators=one), batch, room) for one in places]
    return next((one for one in found if one.fits), found[-1])


def _footprint(name: PlacementName, sizes: Sizes, batch: BatchSizes, room: dict[Device, int]) -> Placement:
    stages = _Stages(name == "offloaded", sizes, batch, "accelerator" if "accelerator" in room else "host")
    weigh = (stages.weigh(sizes.weighing),) if sizes.weighing else ()
    reconstruct = (stages.reconstruct(sizes.reconstruction),) if sizes.reconstruction else ()
    # An offloaded model is calibrated on other text: to write is to read every weight for every token.
    write = (stages.write(),) if sizes.writing and name != "offloaded" else ()
    measure = (stages.measure(),) if sizes.measuring else ()
    recover = (stages.recover(sizes.training),) if sizes.training else ()
    decided = (stages.probe(), *weigh, stages.decide(), *reconstruct)
    return Placement(name, (stages.load(), *write, *decided, *measure, *recover, stages.save()), room)


@dataclass(frozen=True)
class _Stages:
    """The stages of one placement; `where` is the device that the model computes on."""

    offloaded: bool
    sizes: Sizes
    batch: BatchSizes
    where: Device

    def load(self) -> Stage:
        # Tensors that need conversion are read through a mapping of their file. Its pages count as resident memory of
        # the process, and the kernel drops them when memory runs short.
        mapped = 0 if self.offloaded else self.sizes.model.stored
        return Stage("load", (*self._model(), Item("file being read", "host", mapped, reclaimable=True)))

    def write(self) -> Stage:
        return Stage("write", (*self._model(), Item("text that the model writes", self.where, self.sizes.writing)))

    def probe(self) -> Stage:
        model, batch = self.sizes.model, self.batch
        loss = min(batch.loss, batch.peak)
        holes = round(HEAP_HOLES * batch.small_blocks) if self.where == "host" else 0
        shrunk = 2 * model.largest_target * model.itemsize + self._chunks()
        items = (
            Item("activations", self.where, batch.activations),
            Item("logits and their loss", self.where, loss),
            Item("freed, but kept by the heap", self.where, holes),
            Item("a matrix being shrunk and folded", self.where, shrunk),
        )
        return Stage("probe", (*self._model(), self._accumulators(), self._masks(), *items))

    def decide(self) -> Stage:
        items = (
            Item("masks of the candidates", self.where, self._masks().bytes),
            Item("scores of a matrix", self.where, self._chunks()),
        )
        return Stage("decide", (*self._model(), self._accumulators(), self._masks(), *items))

    def weigh(self, sizes: ReconstructionSizes) -> Stage:
        items = (
            Item("Hessians of a block", self.where, sizes.hessians),
            Item("a Hessian being inverted", self.where, sizes.factored),
            Item("a matrix losing units", self.where, sizes.workspace),
            Item("hidden states between two blocks", self.where, 2 * sizes.hidden),
            Item("activations of a forward pass", self.where, self.batch.activations),
        )
        return Stage("weigh", (*self._model(), self._masks(), *items))

    def reconstruct(self, sizes: ReconstructionSizes) -> Stage:
        swept = sizes.factored + self._chunks()
        items = (
            Item("Hessians of a block", self.where, sizes.hessians),
            Item("a Hessian being factored, a matrix being swept", self.where, swept),
            Item("least squares on a matrix", self.where, sizes.workspace),
            Item("a block being trained", self.where, sizes.trained),
            # Inputs of a block and its outputs, while it is finished.
            Item("hidden states between two blocks", self.where, 2 * sizes.hidden),
            Item("activations of a forward pass", self.where, self.batch.activations),
        )
        return Stage("reconstruct", (*self._model(), self._masks(), *self._new_weights(), *items))

    def measure(self) -> Stage:
        logits = Item("a forward pass, logits of both models", self.where, self.sizes.measuring)
        return Stage("measure", (*self._model(), self._masks(), *self._new_weights(), logits))

    def recover(self, sizes: TrainingSizes) -> Stage:
        holes = round(HEAP_HOLES * sizes.small_blocks) if self.where == "host" else 0
        items = (
            Item("the pruned model in float32, two moments", self.where, sizes.states),
            Item("its gradients, a step's activations and logits", self.where, sizes.step),
            Item("freed, but kept by the heap", self.where, holes),
        )
        return Stage("recover", (*self._model(), self._masks(), *self._new_weights(), *items))

    def save(self) -> Stage:
        model = self.sizes.model
        if self.offloaded:
            shard = min(LARGEST_SHARD, max(SMALLEST_SHARD, model.weights // SHARDS)) + model.block
            own = Item("a shard being written", "host", shard)
        else:  # kept until everything has succeeded: a run that fails leaves every weight with its original bits
            pruned = round(self.sizes.sparsity * model.targets)
            own = Item("originals of what is pruned", self.where, pruned * model.itemsize)
        statistics = self._accumulators()
        on_disk = (statistics,) if statistics.device == "disk" else ()
        compared = Item("the smaller model, compared", self.where, 0 if self.offloaded else self.sizes.smaller or 0)
        items = (*self._model(), self._masks(), *self._new_weights(), own, compared, *self._written(), *on_disk)
        return Stage("save", items)

    def _model(self) -> tuple[Item, ...]:
        """The process and the weights in memory, which are there at every stage."""
        model = self.sizes.model
        process = self.sizes.process + FIRST_USE_BYTES + model.vocabulary * TOKENIZER_BYTES_PER_TOKEN
        # Offloaded: the embedding or the output head, and one block after the other.
        held = min(model.weights, model.block + model.ends) if self.offloaded else model.weights
        items = (Item("Python, libraries, tokenizer", "host", process), Item(WEIGHTS, self.where, held))
        if self.where == "host":
            return items
        cuda = (
            Item("CUDA and its libraries", "host", CUDA_PROCESS_BYTES),
            Item("workspaces of cuBLAS", self.where, CUDA_WORKSPACES_BYTES),
        )
        return (*items, *cuda)

    def _accumulators(self) -> Item:
        devices: dict[str, Device] = {"same": self.where, "cpu": "host", "disk": "disk"}
        accumulators = self.sizes.accumulators
        return Item("accumulators", devices[accumulators.device], accumulators.bytes)

    def _masks(self) -> Item:
        return Item("masks", self.where, self.sizes.model.targets // WEIGHTS_PER_MASK_BYTE)

    def _new_weights(self) -> tuple[Item, ...]:
        """New values wait until all blocks are done: in memory, or in files for a model that is offloaded."""
        if self.sizes.reconstruction is None:
            return ()
        size = self.sizes.model.targets * self.sizes.model.itemsize
        return (Item("new weights", "disk" if self.offloaded else self.where, size),)

    def _written(self) -> tuple[Item, ...]:
        """What a run has written by its end; the model's own files are there already."""
        model, masks = self.sizes.model, self._masks().bytes
        smaller = self.sizes.smaller
        items = [Item("checkpoint", "disk", model.weights if smaller is None else smaller)]
        if self.offloaded:  # the user's files are never written to: pruned matrices go to a store of their own
            items.append(Item("offload store of pruned matrices", "disk", model.targets * model.itemsize))
        if self.sizes.snapshots:
            items.append(Item("snapshots for resuming", "disk", self.sizes.accumulators.bytes + masks))
        if self.sizes.training:  # without --resume it is gone by then, and may have been on another disk (TMPDIR)
            items.append(Item("state of the recovery", "disk", self.sizes.training.on_disk))
        return tuple(items)

    def _chunks(self) -> int:
        """Temporaries of the largest chunk of rows, in bytes."""
        return CHUNK_TENSORS * FLOAT32_BYTES * min(FOLDED_ELEMENTS, self.sizes.model.largest_target)
