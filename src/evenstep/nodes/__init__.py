"""The stages, one file each; every one is a `torchdata.nodes.BaseNode` whose state is the bare cursor.

ONLINE    SamplerReader -> MetadataGather -> Planner -> PayloadAllToAll -> Packer -> ...
METADATA  SamplerReader -> Planner -> PlannedReader -> Packer -> ...
EXTERNAL  ExternalStepReader -> MetadataGather -> Planner -> PayloadAllToAll -> Packer -> ...
all       ... -> PinMemory -> HostPrefetch or CallerPrefetch -> DevicePrefetch -> ModelBroadcast
sharded   ... Packer -> ShardPad -> ... -> ModelBroadcast -> ContextShard
"""

from evenstep.nodes.caller_prefetch import CallerPrefetch
from evenstep.nodes.context_shard import ContextShard
from evenstep.nodes.device_prefetch import DevicePrefetch
from evenstep.nodes.external_step_reader import ExternalStepReader
from evenstep.nodes.fetch import Fetcher, InlineFetcher, ThreadFetcher
from evenstep.nodes.host_prefetch import HostPrefetch
from evenstep.nodes.items import Counts, GatheredWindow, Place, PlannedBatch, RoutedBatch, Window
from evenstep.nodes.local_streams import PaddingRow
from evenstep.nodes.metadata_gather import MetadataGather
from evenstep.nodes.model_broadcast import ModelBroadcast
from evenstep.nodes.packer import Packer
from evenstep.nodes.payload_all_to_all import PayloadAllToAll
from evenstep.nodes.pin_memory import PinMemory
from evenstep.nodes.planned_reader import PlannedReader
from evenstep.nodes.planner import Planner
from evenstep.nodes.sample_seed import current_sample_seed
from evenstep.nodes.sampler_reader import SamplerReader
from evenstep.nodes.shard_pad import ShardPad
from evenstep.nodes.spans import Watched, in_span
from evenstep.nodes.stage import Stage
from evenstep.nodes.step_builder import StepBuilder
from evenstep.nodes.worker_processes import ProcessFetcher

__all__ = [
    "CallerPrefetch",
    "ContextShard",
    "Counts",
    "DevicePrefetch",
    "ExternalStepReader",
    "Fetcher",
    "GatheredWindow",
    "HostPrefetch",
    "InlineFetcher",
    "MetadataGather",
    "ModelBroadcast",
    "Packer",
    "PaddingRow",
    "PayloadAllToAll",
    "PinMemory",
    "Place",
    "PlannedBatch",
    "PlannedReader",
    "Planner",
    "ProcessFetcher",
    "RoutedBatch",
    "SamplerReader",
    "ShardPad",
    "Stage",
    "StepBuilder",
    "ThreadFetcher",
    "Watched",
    "Window",
    "current_sample_seed",
    "in_span",
]
