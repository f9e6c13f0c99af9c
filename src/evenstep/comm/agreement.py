"""What all ranks must have been told alike before they talk, and what they learn of each other's hosts."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from evenstep.comm.communicator import Communicator
from evenstep.comm.gather_bytes import gather_bytes
from evenstep.errors import ConfigMismatch, RemoteRankError
from evenstep.topology import Topology

__all__ = ["agree", "dp_ranks_per_host"]

_LONG = 128  # characters: what grows with the world is told by its digest, lest all of it grow with the world's square


def agree(world: Communicator, config: Mapping[str, str], problem: Exception | None) -> list[str]:
    """Compare what the ranks were told, and fail together.

    Returns:
        The host name of every rank.

    Args:
        world: All ranks.
        config: What must be equal, as text by field.
        problem: Why this rank cannot go on, or None.

    Raises:
        ConfigMismatch: Fields differ; names the ranks and the fields, and both values of the first.
        RemoteRankError: Another rank has a problem.
        Exception: ``problem`` itself.
    """
    told = {
        "config": {name: _brief(value) for name, value in config.items()},
        "problem": None if problem is None else [type(problem).__name__, str(problem)],
        "host": socket.gethostname(),
    }
    everybody = [json.loads(data) for data in gather_bytes(world, json.dumps(told).encode())]
    if problem is not None:
        raise problem
    for rank, other in zip(world.ranks, everybody, strict=True):
        if other["problem"] is not None:
            kind, message = other["problem"]
            raise RemoteRankError(
                f"rank {rank} could not build its loader: {kind}: {message}",
                rank=rank,
                error_type=kind,
                error_message=message,
            )
    odd_by_name = _odd_ranks(world, [other["config"] for other in everybody])
    if odd_by_name:
        name, odd = next(iter(odd_by_name.items()))
        one, other_one = _whole(world, odd[0], name, config)
        more = ", ".join(f"{n} (ranks {ranks[:8]})" for n, ranks in list(odd_by_name.items())[1:])
        raise ConfigMismatch(
            f"{name} differs between ranks: rank {world.ranks[0]} has {one}, ranks {odd[:8]} have {other_one}: their "
            f"plans and collectives would not fit together. Give every rank the same {name}."
            + (f" Other fields that differ: {more}." if more else "")
        )
    return [other["host"] for other in everybody]


def _odd_ranks(world: Communicator, configs: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The fields that differ between ranks, and which ranks have something else than the first."""
    found = {}
    for name in sorted({name for config in configs for name in config}):
        expected = configs[0].get(name)
        odd = [r for r, config in zip(world.ranks, configs, strict=True) if config.get(name) != expected]
        if odd:
            found[name] = odd
    return found


def _brief(value: str) -> str | list[str]:
    """The text itself, or, where it is long, a digest that no text looks like."""
    return value if len(value) <= _LONG else [blake2b(value.encode(), digest_size=16).hexdigest()]


def _whole(world: Communicator, odd: int, name: str, config: Mapping[str, str]) -> tuple[Any, Any]:
    """What the first rank and rank ``odd`` were told for ``name``, in full; all ranks ask together."""
    ranks = (world.ranks[0], odd)
    told = json.dumps(config.get(name)).encode() if world.ranks[world.position] in ranks else b""
    texts = dict(zip(world.ranks, gather_bytes(world, told), strict=True))
    return json.loads(texts[ranks[0]]), json.loads(texts[ranks[1]])


def dp_ranks_per_host(topology: Topology, hosts: Sequence[str]) -> int:
    """How many consecutive dp ranks share a host; rank order need not follow hosts, so it is checked."""
    where = [hosts[rank] for rank in topology.constructors]
    size = (
        where.index(next((h for h in where if h != where[0]), where[0]), 1)
        if len(set(where)) > 1
        else len(where)
    )
    blocks = [set(where[start : start + size]) for start in range(0, len(where), size)]
    if len(where) % size or any(len(block) > 1 for block in blocks) or len(set(where)) != len(blocks):
        raise ValueError(
            "balance_group_size='node' needs the same number of consecutive dp ranks on every host, but the hosts by "
            f"dp rank are {where[:16]}: groups would reach across hosts. Pass a number."
        )
    return size
