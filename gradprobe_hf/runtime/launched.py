"""Which of the processes of a launcher this one is, for what needs no collective, and no torch."""

from __future__ import annotations

import os

# How torchrun and the launchers of MPI say it (Intel's and MPICH's, Open MPI's, MVAPICH's), as Accelerate reads them.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def launched() -> int:
    """How many processes a launcher (accelerate, torchrun, accelerate's mpirun) has started to work together.

    Those of an mpirun or srun of the user's own that are not told where to meet work for themselves.
    """
    return _first_of(_SIZES if "MASTER_ADDR" in os.environ else _SIZES[:1], 1)


def is_alone() -> bool:
    """Whether no launcher has started others beside this process."""
    return launched() == 1


def is_first() -> bool:
    """Whether this process is the one that writes: the first of those that a launcher has started, or the only one."""
    return is_alone() or _first_of(_RANKS, 0) == 0


def _first_of(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)
