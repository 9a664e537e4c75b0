"""Footprint: what lies in memory and on disk at each stage of a run, item by item. Arithmetic, in bytes.

A run's highest point is that of its highest stage: in `probe` a batch's activations stand beside the statistics, in
`decide` two sets of masks, in `reconstruct` the new weights and a block's Hessians, in `save` the originals of what was
pruned, and in `load` the file that is read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from gradprobe_hf.config import AccumulatorDevice
from gradprobe_hf.model.saving import LARGEST_SHARD, SHARDS, SMALLEST_SHARD
from gradprobe_hf.runtime.row_chunks import FOLDED_ELEMENTS

Device = Literal["host", "accelerator", "disk"]
PlacementName = Literal["resident", "checkpointed", "offloaded"]

DEVICES: tuple[Device, ...] = get_args(Device)

# Folding and selection go through a matrix in pieces of rows, and a piece has about this many float32 temporaries.
CHUNK = FOLDED_ELEMENTS
CHUNK_TENSORS = 6
FLOAT32_BYTES = 4
# A fast tokenizer maps each token to its text, the text back, and its merges: what SmolLM2's takes.
BYTES_PER_TOKEN_OF_VOCABULARY = 1000
# Pages of the libraries that a run touches first, and the calibration text with its tokens: of a run on "pydoc".
FIRST_USE = 50 * 10**6
MASK_BITS = 8
HESSIAN_TENSORS = 4  # damped, its Cholesky factor, the inverse, and the factor of that
# The holes that a CPU's heap keeps between the blocks that are alive, as a share of those: freed temporaries lie
# between kept activations. Measured with glibc on SmolLM2; there are none with MALLOC_MMAP_THRESHOLD_=65536.
HEAP_HOLES = 0.4


@dataclass(frozen=True)
class Sizes:
    """What decides a footprint. Bytes, where it does not say otherwise.

    Attributes:
        base: of the process before it loads a model.
        vocabulary: tokens.
        weights: all parameters.
        stored: the checkpoint's files, 0 where they need no conversion.
        block, ends: the largest block, the larger of embedding and output head.
        largest_target: elements of the largest matrix.
        targets: elements of all targets.
        itemsize: bytes of a weight.
        sparsity: fraction of the targets to prune.
        accumulators: statistics `[out, in]` of the whole run.
        accumulator_device: where they are kept.
        loss: the part of `activations` that is the logits and their loss.
        snapshots: whether a run that can be resumed writes its state.
        hessians: what a reconstruction collects of one block; 0 without one.
        largest_hessian: of one matrix.
        solved: what least squares on the largest matrix takes besides.
        hidden: what a reconstruction keeps of the calibration text between two blocks.
    """

    base: int
    vocabulary: int
    weights: int
    stored: int
    block: int
    ends: int
    largest_target: int
    targets: int
    itemsize: int
    sparsity: float
    accumulators: int
    accumulator_device: AccumulatorDevice
    loss: int
    snapshots: bool = False
    hessians: int = 0
    largest_hessian: int = 0
    solved: int = 0
    hidden: int = 0


@dataclass(frozen=True)
class Item:
    """Something that takes memory. A `reclaimable` one, a mapped file, shows in a peak, but always makes room."""

    label: str
    device: Device
    bytes: int
    reclaimable: bool = False


@dataclass(frozen=True)
class Stage:
    """What is there at one time."""

    name: str
    items: tuple[Item, ...]

    def bytes_on(self, device: Device, needed: bool = False) -> int:
        """The sum on a device; `needed`: of what cannot make room."""
        return sum(item.bytes for item in self.items if item.device == device and not (needed and item.reclaimable))


@dataclass(frozen=True)
class Placement:
    """One way to hold the model: its stages in order, and the free bytes of each device."""

    name: PlacementName
    stages: tuple[Stage, ...]
    room: dict[Device, int]

    def peak_stage(self, device: Device) -> Stage:
        return max(self.stages, key=lambda stage: stage.bytes_on(device))

    def peak(self, device: Device) -> int:
        return self.peak_stage(device).bytes_on(device)

    def needed(self, device: Device) -> int:
        """The least memory that the run can do with."""
        return max(stage.bytes_on(device, needed=True) for stage in self.stages)

    @property
    def fits(self) -> bool:
        return all(self.needed(device) <= free for device, free in self.room.items())

    def to_dict(self) -> dict[str, Any]:
        stages = {stage.name: [asdict(item) for item in stage.items] for stage in self.stages}
        peaks = {device: self.peak(device) for device in self.room}
        return {"name": self.name, "fits": self.fits, "peak_bytes": peaks, "room_bytes": self.room, "stages": stages}


def footprint_of(
    name: PlacementName, sizes: Sizes, activations: int, room: dict[Device, int], heap: int = 0
) -> Placement:
    """The footprint of one placement.

    Args:
        activations: the most that a batch takes, the loss included.
        heap: of them what is alive at once in small blocks.
        room: free bytes per device; a model computes on the accelerator where there is one.
    """
    where: Device = "accelerator" if "accelerator" in room else "host"
    # Offloaded: the embedding or the output head, then one block after the other.
    alive = min(sizes.weights, sizes.block + sizes.ends) if name == "offloaded" else sizes.weights
    process = sizes.base + FIRST_USE + sizes.vocabulary * BYTES_PER_TOKEN_OF_VOCABULARY
    base = Item("Python, libraries, tokenizer", "host", process)
    weights = Item("weights", where, alive)
    kept_at: dict[AccumulatorDevice, Device] = {"same": where, "cpu": "host", "disk": "disk"}
    statistics = Item("accumulators", kept_at[sizes.accumulator_device], sizes.accumulators)
    masks = Item("masks", where, sizes.targets // MASK_BITS)
    pieces = CHUNK_TENSORS * FLOAT32_BYTES * min(CHUNK, sizes.largest_target)
    probe = (
        Item("activations", where, activations - min(sizes.loss, activations)),
        Item("logits and their loss", where, min(sizes.loss, activations)),
        Item("freed, but kept by the heap", where, round(HEAP_HOLES * heap) if where == "host" else 0),
        Item("a matrix being shrunk and folded", where, 2 * sizes.largest_target * sizes.itemsize + pieces),
    )
    decide = (
        Item("masks of the candidates", where, masks.bytes),
        Item("scores of a matrix", where, pieces),
    )
    # Of a model in memory they wait there; of one that is offloaded, in files.
    updates = Item("new weights", "disk" if name == "offloaded" else where, sizes.targets * sizes.itemsize)
    new = (updates,) if sizes.hessians else ()
    reconstruct = (
        Item("Hessians of a block", where, sizes.hessians),
        Item("a Hessian being factored, a matrix being swept", where, HESSIAN_TENSORS * sizes.largest_hessian + pieces),
        Item("least squares on a matrix", where, sizes.solved),
        Item("hidden states between two blocks", where, 2 * sizes.hidden),  # of both, while a block is finished
        Item("activations of a forward pass", where, activations - min(sizes.loss, activations)),
    )
    originals = Item("originals of what is pruned", where, round(sizes.sparsity * sizes.targets) * sizes.itemsize)
    shard = min(LARGEST_SHARD, max(SMALLEST_SHARD, sizes.weights // SHARDS)) + sizes.block
    save = (Item("a shard being written", "host", shard) if name == "offloaded" else originals,)
    mapped = Item("file being read", "host", 0 if name == "offloaded" else sizes.stored, reclaimable=True)
    written = _on_disk(name, sizes)
    return Placement(
        name,
        (
            Stage("load", (base, weights, mapped)),
            Stage("probe", (base, weights, statistics, masks, *probe)),
            Stage("decide", (base, weights, statistics, masks, *decide)),
            *([Stage("reconstruct", (base, weights, masks, *new, *reconstruct))] if new else []),
            Stage("save", (base, weights, masks, *new, *save, *written, *_if_on_disk(statistics))),
        ),
        room,
    )


def _on_disk(name: PlacementName, sizes: Sizes) -> tuple[Item, ...]:
    """Everything that a run has written by its end; the model's own files are there already."""
    items = [Item("checkpoint", "disk", sizes.weights)]
    if name == "offloaded":  # the user's files are never written to: pruned matrices go to a store of their own
        items.append(Item("offload store of pruned matrices", "disk", sizes.targets * sizes.itemsize))
    if sizes.snapshots:
        items.append(Item("snapshots for resuming", "disk", sizes.accumulators + sizes.targets // MASK_BITS))
    return tuple(items)


def _if_on_disk(item: Item) -> tuple[Item, ...]:
    return (item,) if item.device == "disk" else ()
