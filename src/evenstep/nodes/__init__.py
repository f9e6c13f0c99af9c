"""The stages, one file each; every one is a `torchdata.nodes.BaseNode` whose state is the bare cursor.

ONLINE    SamplerReader -> MetadataGather -> Planner -> PayloadAllToAll -> Packer -> ...
METADATA  SamplerReader -> Planner -> PlannedReader -> Packer -> ...
both      ... -> PinMemory -> HostPrefetch -> DevicePrefetch -> ModelBroadcast
"""

from evenstep.nodes.caller_prefetch import CallerPrefetch
from evenstep.nodes.device_prefetch import DevicePrefetch
from evenstep.nodes.host_prefetch import HostPrefetch
from evenstep.nodes.items import GatheredWindow, Place, PlannedBatch, RoutedBatch, Window
from evenstep.nodes.metadata_gather import MetadataGather
from evenstep.nodes.model_broadcast import ModelBroadcast
from evenstep.nodes.packer import Packer
from evenstep.nodes.payload_all_to_all import PayloadAllToAll
from evenstep.nodes.pin_memory import PinMemory
from evenstep.nodes.planned_reader import PlannedReader
from evenstep.nodes.planner import Planner
from evenstep.nodes.sampler_reader import SamplerReader
from evenstep.nodes.stage import Stage

__all__ = [
    "CallerPrefetch",
    "DevicePrefetch",
    "GatheredWindow",
    "HostPrefetch",
    "MetadataGather",
    "ModelBroadcast",
    "Packer",
    "PayloadAllToAll",
    "PinMemory",
    "Place",
    "PlannedBatch",
    "PlannedReader",
    "Planner",
    "RoutedBatch",
    "SamplerReader",
    "Stage",
    "Window",
]
