"""Who reads, who plans, who builds batches: roles of ranks as a pure function of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["DEFAULT_DP_DIMS", "Topology"]

DEFAULT_DP_DIMS = ("dp_replicate", "dp_shard", "dp")


@dataclass(frozen=True, slots=True)
class Topology:
    """Roles of every global rank; equal on all ranks but for ``rank``.

    Attributes:
        rank: This process's global rank.
        replicas: Global ranks of each data-parallel replica by dp rank, its constructor first.
        readers: Global ranks that read for each dp rank; never empty.
        planners: The planning rank of each balance group.
        balance_group_size: dp ranks that are balanced together.
        coordinates: Name of each mesh dimension, this process's position in it, and its size.
        dp_dims: Names of the data-parallel dimensions.
    """

    rank: int
    replicas: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[int, ...], ...]
    planners: tuple[int, ...]
    balance_group_size: int
    coordinates: tuple[tuple[str, int, int], ...] = ()
    dp_dims: tuple[str, ...] = ("dp",)

    @classmethod
    def single(cls) -> Topology:
        """One process that does everything."""
        return cls(0, ((0,),), ((0,),), (0,), 1)

    @classmethod
    def from_mesh(
        cls,
        ranks: npt.NDArray[np.integer],
        dim_names: Sequence[str] | None,
        *,
        rank: int,
        dp_dims: Sequence[str] | None = None,
        reader_ranks: str | Sequence[int] | None = None,
        planner_rank: int | None = None,
        balance_group_size: int | None = None,
    ) -> Topology:
        """Roles from the ranks of a device mesh.

        Args:
            ranks: Global ranks by mesh coordinate, any integer dtype, any number of dimensions.
            dim_names: One name per dimension; None is allowed for a one-dimensional (data-parallel) mesh.
            rank: This process's global rank.
            dp_dims: Data-parallel dimensions, slowest first; default: those of ``dp_replicate``,
                ``dp_shard``, ``dp`` that the mesh has.
            reader_ranks: None (constructors), ``"all"``, or global ranks.
            planner_rank: The rank that plans; default: the first constructor of each balance group.
            balance_group_size: dp ranks balanced together; default: all.

        Raises:
            ValueError: The mesh, a name or a rank does not fit; the message names it.
        """
        names = _names(ranks, dim_names)
        data = _dp_dims(names, dp_dims)
        order = [names.index(name) for name in data] + [i for i, name in enumerate(names) if name not in data]
        dp_size = int(np.prod([ranks.shape[names.index(name)] for name in data], dtype=np.int64))
        replicas = tuple(tuple(int(r) for r in row) for row in ranks.transpose(order).reshape(dp_size, -1))
        world = sorted(r for replica in replicas for r in replica)
        if world != list(range(len(world))):
            raise ValueError(
                f"the mesh holds the ranks {world}, expected each of 0..{len(world) - 1} once: a rank outside the "
                "mesh would wait for ever. Build the loader with a mesh that covers the world."
            )
        group = dp_size if balance_group_size is None else balance_group_size
        if isinstance(group, bool) or not isinstance(group, int) or group < 1 or dp_size % group:
            raise ValueError(
                f"balance_group_size={balance_group_size!r} does not divide the {dp_size} data-parallel ranks: "
                "some ranks would be balanced with nobody. Choose a divisor."
            )
        readers = _readers(replicas, reader_ranks, group)
        place = np.argwhere(np.asarray(ranks) == rank)[0].tolist()
        return cls(
            rank,
            replicas,
            readers,
            _planners(replicas, group, planner_rank),
            group,
            tuple(zip(names, place, ranks.shape, strict=True)),
            tuple(data),
        )

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return len(self.replicas)

    @property
    def dp_rank(self) -> int:
        """The data-parallel replica that this process belongs to."""
        return next(d for d, replica in enumerate(self.replicas) if self.rank in replica)

    @property
    def constructors(self) -> tuple[int, ...]:
        """Global rank that builds the batches of each dp rank."""
        return tuple(replica[0] for replica in self.replicas)

    @property
    def is_constructor(self) -> bool:
        """Whether this process builds batches."""
        return self.rank in self.constructors

    @property
    def is_reader(self) -> bool:
        """Whether this process reads samples."""
        return any(self.rank in ranks for ranks in self.readers)

    @property
    def group_start(self) -> int:
        """First dp rank of this process's balance group."""
        return self.dp_rank // self.balance_group_size * self.balance_group_size

    def data_plane(self, group: int | None = None) -> tuple[int, ...]:
        """Global ranks that read, plan or construct, in dp-rank order; of one balance group or of all."""
        size = self.balance_group_size
        groups = range(self.dp_size // size) if group is None else [group]
        members: list[int] = []
        for g in groups:
            for d in range(g * size, (g + 1) * size):
                members += [self.replicas[d][0], *self.readers[d]]
            members.append(self.planners[g])
        return tuple(dict.fromkeys(members))

    @property
    def in_data_plane(self) -> bool:
        """Whether this process reads, plans or constructs."""
        return self.rank in self.data_plane()

    @property
    def planner(self) -> int:
        """The planning rank of this process's balance group."""
        return self.planners[self.dp_rank // self.balance_group_size]

    def model_coordinate(self, dim: str) -> tuple[int, int]:
        """This process's position in the mesh dimension ``dim`` and its size; (0, 1) in a single process.

        Raises:
            ValueError: The mesh has no such dimension, or it is data parallel.
        """
        if dim in self.dp_dims:
            raise ValueError(
                f"mesh dimension {dim!r} is data parallel: its ranks hold different samples, so there is nothing to "
                "share among them. Name a context-parallel or another model-parallel dimension."
            )
        if not self.coordinates:
            return 0, 1
        for name, position, size in self.coordinates:
            if name == dim:
                return position, size
        raise ValueError(
            f"the mesh has no dimension {dim!r}, only {[name for name, _, _ in self.coordinates]}: nobody could tell "
            "which part is this rank's. Name one of them, or add the dimension to the mesh."
        )


def _names(ranks: npt.NDArray[np.integer], dim_names: Sequence[str] | None) -> list[str]:
    if dim_names is None:
        if ranks.ndim != 1:
            raise ValueError(
                f"the mesh has {ranks.ndim} dimensions without names, so nobody can tell which are data parallel; "
                "pass mesh_dim_names to init_device_mesh."
            )
        return ["dp"]
    return list(dim_names)


def _dp_dims(names: list[str], dp_dims: Sequence[str] | None) -> list[str]:
    if dp_dims is None:
        found = [name for name in DEFAULT_DP_DIMS if name in names]
        if not found and len(names) > 0:
            raise ValueError(
                f"the mesh dimensions {names} hold none of {list(DEFAULT_DP_DIMS)}: every rank would read the same "
                "samples. Name the data-parallel dimensions with dp_dims=(...)."
            )
        return found
    if isinstance(dp_dims, str):
        raise TypeError(f"dp_dims is the string {dp_dims!r}, expected a tuple of names, e.g. ({dp_dims!r},)")
    unknown = [name for name in dp_dims if name not in names]
    if unknown or len(set(dp_dims)) != len(dp_dims):
        raise ValueError(
            f"dp_dims={tuple(dp_dims)!r} names {unknown or 'a dimension twice'}; the mesh has {names}"
        )
    return list(dp_dims)


def _readers(
    replicas: tuple[tuple[int, ...], ...], reader_ranks: str | Sequence[int] | None, group: int
) -> tuple[tuple[int, ...], ...]:
    if reader_ranks is None:
        return tuple((replica[0],) for replica in replicas)
    if reader_ranks == "all":
        return replicas
    if isinstance(reader_ranks, str):
        raise ValueError(f"reader_ranks={reader_ranks!r}, expected None, 'all' or a tuple of ranks")
    world = {rank for replica in replicas for rank in replica}
    unknown = [rank for rank in reader_ranks if rank not in world]
    if unknown or not reader_ranks or len(set(reader_ranks)) != len(reader_ranks):
        raise ValueError(
            f"reader_ranks={tuple(reader_ranks)!r}: expected at least one rank, each once, each of the "
            f"{len(world)} ranks of the mesh; unknown: {unknown}"
        )
    own = [tuple(rank for rank in replica if rank in set(reader_ranks)) for replica in replicas]
    readers: list[tuple[int, ...]] = []
    for d, ranks in enumerate(own):
        # A replica without a reader is read for by the others of its group in turn; its payload then travels.
        start = d // group * group
        near = [rank for others in own[start : start + group] for rank in others]
        if not near:
            raise ValueError(
                f"reader_ranks={tuple(reader_ranks)!r} leaves the balance group of dp ranks {start}.."
                f"{start + group - 1} without a reader, and payload never crosses groups; add a rank of it"
            )
        readers.append(ranks or (near[d % len(near)],))
    return tuple(readers)


def _planners(replicas: tuple[tuple[int, ...], ...], group: int, planner_rank: int | None) -> tuple[int, ...]:
    first = [replicas[start][0] for start in range(0, len(replicas), group)]
    if planner_rank is None:
        return tuple(first)
    for g in range(len(first)):
        if any(planner_rank in replica for replica in replicas[g * group : (g + 1) * group]):
            first[g] = planner_rank
            return tuple(first)
    raise ValueError(f"planner_rank={planner_rank!r} is not a rank of the mesh")
