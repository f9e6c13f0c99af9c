"""What moving samples costs beside the bare collectives: run it under torchrun on your own cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evenstep.bench.gather import measure_gather
from evenstep.bench.machine import as_line, describe_machine
from evenstep.bench.options import exchange as add_arguments
from evenstep.bench.payload import measure_exchange, measure_huge
from evenstep.bench.windows import count_collectives
from evenstep.comm.gloo_threads import destroy_process_group
from evenstep.comm.groups import world_communicator
from evenstep.comm.plane import DataPlane
from evenstep.testing import run_ranks

__all__ = ["add_arguments", "as_text", "measure", "run"]

_TIMEOUT = timedelta(minutes=5)


def run(args: argparse.Namespace) -> int:
    """Measure what ``args`` says, print it on stdout, and return the exit status."""
    sizes = [kib * 1024 for kib in args.sample_kib]
    payloads = [int(mib * (1 << 20)) for mib in args.mib]
    options: tuple[Any, ...] = (payloads, sizes, args.metadata, args.repeats)
    work: Callable[..., dict[str, Any]] = measure
    if args.huge_gib is not None:
        work, options = move_huge, (int(args.huge_gib * (1 << 30)),)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        result = work(dist.get_rank(), *options)
        if dist.get_rank() == 0:
            _print([result], args.json)
        destroy_process_group()
        return 0
    _print([run_ranks(work, ranks, *options, timeout=600.0)[0] for ranks in args.ranks], args.json)
    return 0


def measure(_rank: int, payloads: list[int], sizes: list[int], metadata: int, repeats: int) -> dict[str, Any]:
    """Seconds (until all ranks are done; medians), bytes and ratios; on every rank of the default group.

    Each rank sends so many bytes of samples, in equal parts to all others. Ratios are medians of the ratios
    inside one turn.
    """
    communicator = world_communicator(_TIMEOUT)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plane = DataPlane.from_mesh(mesh, timeout=_TIMEOUT)  # as a loader's
    sharing = plane.payload
    assert sharing is not None
    result = {
        "machine": describe_machine(),
        "ranks": len(communicator.ranks),
        "shared_memory": sharing.memory is not None,
        "exchanges": [
            measure_exchange(communicator, sharing, payload, size, repeats)
            for size in sizes
            for payload in payloads
        ],
        "gather": measure_gather(communicator, metadata, repeats),
        "collectives": count_collectives(),
    }
    plane.close()
    return result


def move_huge(_rank: int, payload_bytes: int) -> dict[str, Any]:
    """One exchange of ``payload_bytes`` from each rank of the default group."""
    return {
        "machine": describe_machine(),
        "huge": measure_huge(world_communicator(_TIMEOUT), payload_bytes),
    }


def _print(results: list[dict[str, Any]], as_json: bool) -> None:
    text = json.dumps(results, indent=2) if as_json else "\n\n".join(map(as_text, results))
    print(text, flush=True)


def as_text(r: dict[str, Any]) -> str:
    """One result as a table and two lines."""
    if "huge" in r:
        return _huge_as_text(r)
    lines = [
        as_line(r["machine"]),
        "",
        f"{r['ranks']} ranks, {'which share memory' if r['shared_memory'] else 'which share no memory'}; milliseconds",
        "  sample  sent by each     raw   memcpy     both    torch     wire  evenstep   pickled   wire: of raw + memcpy  of both  "
        "of torch   evenstep: of raw + memcpy  x pickle  memory/byte",
    ]
    for e in r["exchanges"]:
        ms = {name: 1e3 * seconds for name, seconds in e["seconds"].items()}
        lines.append(
            f"{e['sample_bytes'] // 1024:4d} KiB {e['moved_bytes'] / 2**20:9.1f} MiB {ms['raw']:7.2f} {ms['memcpy']:8.2f} {ms['memcpy_and_raw']:8.2f} "
            f"{ms['torch']:8.2f} {ms['wire']:8.2f} {ms['evenstep']:9.2f} {ms['pickled']:9.2f}   {e['wire_of_sum']:21.2f} "
            f"{e['wire_of_both']:8.2f} {e['wire_of_torch']:9.2f}   {e['of_sum']:25.2f} {e['times_faster_than_pickle']:9.1f} "
            f"{e['memory_per_byte']:12.2f}"
        )
    g = r["gather"]
    ms = {name: 1e3 * seconds for name, seconds in g["seconds"].items()}
    c = r["collectives"]
    return "\n".join(
        [
            *lines,
            "",
            f"metadata of {g['samples']:,} samples a rank ({g['column_bytes']:,} bytes): raw gather {ms['raw']:.2f} ms, "
            f"evenstep {ms['evenstep']:.2f} ms with its status header, all_gather_object {ms['all_gather_object']:.2f} ms "
            f"of SampleMetadata ({g['times_faster_than_objects']:.1f}x), {ms['all_gather_tuples']:.2f} ms of tuples "
            f"({g['times_faster_than_tuples']:.1f}x)",
            f"a loader over {c['windows']} windows, {c['micro_batches']} micro-batches: "
            f"{c['control_per_window']:.2f} control collectives and {c['control_bytes_per_window']:,.0f} bytes a window, "
            f"{c['exchanges_per_micro_batch']:.2f} exchanges a micro-batch; rank 0 read {c['read_bytes']:,} bytes of "
            f"samples and sent {c['exchanged_bytes']:,}",
        ]
    )


def _huge_as_text(r: dict[str, Any]) -> str:
    huge = r["huge"]
    return "\n".join(
        [
            as_line(r["machine"]),
            "",
            f"{huge['ranks']} ranks, {huge['moved_bytes'] / 2**30:.2f} GiB sent by each in {huge['seconds']:.2f} s "
            f"({huge['moved_bytes'] / 2**30 / huge['seconds']:.2f} GiB/s) over the wire: all {huge['samples']:,} samples that "
            f"rank 0 received are right; {huge['memory_per_byte']:.2f} bytes of memory a byte",
        ]
    )
